// What the reader chose stands in the page's address, so that a copied address shows the same.
const state = { at: null, run: 0, by: "category", pick: null, filter: "", least: 0, section: "", hidden: new Set() };
const watchers = [];
const PARTS_OF_DEVICE = ["cached", "inactive_split", "private_pools", "non_torch", "free"];
const legends = all(".legend li[data-category]").filter((item) => !PARTS_OF_DEVICE.includes(item.dataset.category));
const categories = [...new Set(legends.map((item) => item.dataset.category))];

/** Read "#at=1234&run=1&filter=words&least=1048576&hide=weights,gradients" ("only=" where fewer are shown than hidden);
 *  "section=icicle" of a copied link is where its reader was. */
const readAddress = () => {
  const words = location.hash.slice(1);
  if (!words.includes("=")) return false;
  const given = new URLSearchParams(words), list = (name) => (given.get(name) || "").split(",").filter(Boolean);
  state.at = given.get("at");
  state.run = Number(given.get("run") || 0);
  state.by = given.get("by") === "allocation" ? "allocation" : "category";
  state.pick = given.has("pick") ? Number(given.get("pick")) : null;
  state.filter = given.get("filter") || "";
  state.least = Number(given.get("least") || 0);
  state.section = given.get("section") || "";
  state.hidden = new Set(given.has("only") ? categories.filter((c) => !list("only").includes(c)) : list("hide"));
  return true;
};
const addressWords = (section = "") => {
  const words = new URLSearchParams(), shown = categories.filter((c) => !state.hidden.has(c));
  if (state.at !== null) words.set("at", state.at);
  if (state.run) words.set("run", state.run);
  if (state.by !== "category") words.set("by", state.by);
  if (state.pick !== null) words.set("pick", state.pick);
  if (state.filter) words.set("filter", state.filter);
  if (state.least) words.set("least", state.least);
  if (state.hidden.size && shown.length < state.hidden.size) words.set("only", shown.join(","));
  else if (state.hidden.size) words.set("hide", [...state.hidden].join(","));
  if (section) words.set("section", section);
  return words.toString().replaceAll("%2C", ",");
};
const writeAddress = () => {
  // Inside somebody's frame the address is theirs.
  if (window.top !== window) return;
  const hash = addressWords();
  if (hash || location.hash.includes("=")) history.replaceState(null, "", hash ? "#" + hash : location.pathname + location.search);
};
readAddress();
/** Scroll to where the reader of a copied link was; a selection alone is in the timeline. Run when all is laid out. */
const arrive = () => {
  const section = state.section || (state.pick !== null ? "timeline" : ""), target = section && $$(section);
  if (target && target.matches("main > section, main section")) target.scrollIntoView({ behavior: "instant" });
};
window.addEventListener("hashchange", () => { if (readAddress()) { watchers.forEach((watch) => watch()); arrive(); } });
