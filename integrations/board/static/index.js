/** The Memory tab: pick a recording, see its report; pick a second one, see both. Everything else is the report's. */

const url = (name, parameters = {}) => {
  const address = new URL("../" + name, import.meta.url);
  for (const [key, value] of Object.entries(parameters)) address.searchParams.set(key, value);
  return address;
};

const make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
};

const drawn = (tag, attributes) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
};

const STYLE = `
  :root { --back: #fff; --ink: #24292f; --line: #d8dde3; --muted: #5b6570; color-scheme: light; }
  :root.dark { --back: #14181d; --ink: #d6dbe1; --line: #39424c; --muted: #98a2ad; color-scheme: dark; }
  html, body { height: 100%; margin: 0; background: var(--back); color: var(--ink); font: 14px/1.4 system-ui, sans-serif; }
  body { display: flex; flex-direction: column; }
  form { display: flex; flex-wrap: wrap; gap: .5rem 1rem; align-items: center; padding: .5rem 1rem; border-bottom: 1px solid var(--line); }
  label { display: inline-flex; gap: .4rem; align-items: center; }
  select, button { font: inherit; color: inherit; background: var(--back); border: 1px solid var(--line); border-radius: 4px; padding: .2rem .5rem; max-width: 26rem; }
  :is(select, button):focus-visible { outline: 2px solid #2f7de1; outline-offset: 1px; }
  output { color: var(--muted); }
  #first-step, #second-step { min-width: 9rem; max-width: none; }
  #trend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; align-items: center; padding: .3rem 1rem; border-bottom: 1px solid var(--line); color: var(--muted); font-size: 12.5px; }
  #trend svg { flex: 1 1 16rem; height: 44px; min-width: 0; }
  #trend polyline { fill: none; stroke-width: 1.5; vector-effect: non-scaling-stroke; }
  #trend line { stroke: var(--line); vector-effect: non-scaling-stroke; }
  #trend line.recorded { stroke: var(--muted); stroke-dasharray: 2 2; }
  #trend line.chosen { stroke: var(--ink); stroke-width: 2; }
  #trend i { display: inline-block; width: .8rem; height: 3px; margin-right: .3rem; vertical-align: middle; }
  [hidden] { display: none !important; }
  iframe { flex: 1; border: 0; width: 100%; background: var(--back); }
  .empty { margin: 3rem auto; max-width: 42rem; padding: 0 1rem; }
  code { font-size: .95em; }
`;

const EMPTY = [
  "There is no recording below this log directory yet.",
  "Add MemProfCallback() to the trainer's callbacks and start TensorBoard on the trainer's output_dir: recordings are in its folder _memprof, and the first is written after the second optimizer step.",
];

const key = (recording) => [recording.run, recording.step, recording.rank].join("\n");
const unique = (values) => [...new Set(values)];
const COLOURS = { "Peak reserved": "#2f7de1", "Peak allocated": "#d07a00", "Host, resident": "#7b8794" };
const PARTS = ["run", "step", "rank"];

/** TensorBoard keeps what belongs to a plugin in its own address, after the plugin's name: `#memprof&p.memprof.run=...`. */
const PREFIX = "p.memprof.";
const outer = () => { try { return typeof parent.location.hash === "string" ? parent : null; } catch (error) { return null; } };
const readAddress = () => {
  const found = {};
  for (const part of (outer()?.location.hash || "").slice(1).split("&")) {
    const [name, value = ""] = part.split("=");
    if (name.startsWith(PREFIX)) try { found[name.slice(PREFIX.length)] = decodeURIComponent(value); } catch (error) { /* cut off while it was copied */ }
  }
  return found;
};
const writeAddress = (values) => {
  const page = outer();
  if (!page) return;
  const others = page.location.hash.slice(1).split("&").filter((part) => !part.startsWith(PREFIX));
  const ours = Object.entries(values).map(([name, value]) => PREFIX + name + "=" + encodeURIComponent(value));
  const hash = "#" + [...others, ...ours].join("&");
  if (hash !== page.location.hash) page.history.replaceState(page.history.state, "", hash);
};

class Tab {
  constructor() {
    this.recordings = [];
    this.picks = [this.picker("Run", "first"), this.picker("Compare with", "second")];
    this.refresh = make("button", { type: "button", id: "refresh" }, "Refresh");
    this.status = make("output", { "aria-live": "polite" });
    this.trend = make("div", { id: "trend", hidden: "" });
    this.frame = make("iframe", { title: "memprof report" });
    this.empty = make("div", { class: "empty" }, ...EMPTY.map((words) => make("p", {}, words)));
    const form = make("form", {}, ...this.picks.map((pick) => pick.element), this.refresh, this.status);
    form.addEventListener("submit", (event) => event.preventDefault());
    document.head.append(make("style", {}, STYLE));
    document.body.append(form, this.trend, this.empty, this.frame);
    this.refresh.addEventListener("click", () => this.load(true));
    this.frame.addEventListener("load", () => this.shown());
    this.followTheme();
    outer()?.addEventListener("hashchange", () => { if (outer()?.location.hash.startsWith("#memprof")) this.follow(); });
  }

  /** Choose what the address names, as far as it exists. */
  follow() {
    const named = readAddress();
    for (const pick of this.picks) {
      const prefix = pick.id === "first" ? "" : "with_";
      PARTS.forEach((part, level) => {
        const value = named[prefix + part];
        if (value === undefined || ![...pick.selects[level].options].some((option) => option.value === value)) return;
        pick.selects[level].value = value;
        this.fill(pick, level);
      });
    }
    this.show();
  }

  /** Three selects: run, step, rank. */
  picker(label, id) {
    const selects = PARTS.map((part) =>
      make("select", { id: id + "-" + part, "aria-label": label + ": " + part }));
    const pick = { id, selects, chosen: null, element: make("label", {}, label, ...selects) };
    selects.forEach((select, level) => select.addEventListener("change", () => { this.fill(pick, level); this.show(); }));
    return pick;
  }

  /** Offer what there is for the choices made up to `level`, keeping later ones where they still exist. */
  fill(pick, level = -1) {
    const wanted = pick.selects.map((select) => select.value);
    const optional = pick.id === "second";
    let left = this.recordings;
    PARTS.forEach((part, i) => {
      const select = pick.selects[i];
      const values = unique(left.map((r) => String(r[part])));
      if (i > level) {
        const options = values.map((value) => make("option", { value }, this.words(part, value, left)));
        if (optional && i === 0) options.unshift(make("option", { value: "" }, "nothing"));
        select.replaceChildren(...options);
        if (values.includes(wanted[i])) select.value = wanted[i];
        else if (part === "step" && values.length) select.value = values[values.length - 1];
      }
      left = left.filter((r) => String(r[part]) === select.value);
      select.hidden = i > 0 && (values.length === 0 || (part === "rank" && values.length < 2));
    });
    pick.chosen = left[0] || null;
  }

  words(part, value, among) {
    if (part === "rank") return "rank " + value;
    if (part === "run") return value;
    const highest = among.filter((r) => String(r.step) === value && r.peak).sort((a, b) => b.peak_bytes - a.peak_bytes)[0];
    return "step " + value + (highest ? " · " + highest.peak : "");
  }

  async load(again = false) {
    this.refresh.disabled = true;
    try {
      const answer = await (await fetch(url("recordings"))).json();
      this.recordings = answer.recordings;
      this.status.textContent = answer.problem || "";
    } catch (error) {
      this.status.textContent = "TensorBoard does not answer: " + error.message;
    }
    this.refresh.disabled = false;
    this.picks.forEach((pick) => this.fill(pick));
    this.empty.hidden = this.recordings.length > 0;
    this.frame.hidden = this.trend.hidden = this.recordings.length === 0;
    if (!this.address) this.follow();
    this.show(again);
  }

  show(again = false) {
    const [first, second] = this.picks.map((pick) => pick.chosen);
    if (!first) return;
    const named = (recording, prefix) => ({
      [prefix + "run"]: recording.run, [prefix + "step"]: recording.step, [prefix + "rank"]: recording.rank,
    });
    const address = second ? url("compare", { ...named(first, "a_"), ...named(second, "b_") }) : url("page", named(first, ""));
    writeAddress({ ...named(first, ""), ...(second ? named(second, "with_") : {}) });
    this.drawTrend(first);
    address.searchParams.set("changed", Math.max(first.changed, second ? second.changed : 0));
    if (this.address === String(address) && !again) return;
    this.address = String(address);
    this.status.textContent = "Reading " + (second ? "two recordings" : "the recording") + " …";
    // The place in the browser's history is TensorBoard's.
    this.frame.contentWindow.location.replace(this.address);
  }

  /** Draw every step's memory, of which the recorded ones can be opened; the chosen one is marked. */
  async drawTrend(first) {
    const from = String(url("trend", { run: first.run, step: first.step, rank: first.rank }));
    this.trendFrom = from;
    let found = { steps: [], curves: [] };
    try { found = await (await fetch(from)).json(); } catch (error) { /* the recording itself is shown without it */ }
    if (this.trendFrom !== from) return;
    const { steps = [], curves = [] } = found;
    this.trend.hidden = !curves.length;
    if (!curves.length) return;
    const low = steps[0], span = steps[steps.length - 1] - low || 1;
    const highest = Math.max(...curves.flatMap((curve) => curve.bytes.map((n) => n || 0)), 1);
    const x = (step) => (4 + (step - low) / span * 992).toFixed(1);
    const y = (bytes) => (40 - bytes / highest * 36).toFixed(1);
    const words = curves.map((curve) => `${curve.label} ${curve.words}`).join("; ");
    const svg = drawn("svg", { viewBox: "0 0 1000 44", preserveAspectRatio: "none", role: "img", "aria-label": `Memory by step: ${words}` });
    svg.append(drawn("line", { x1: 0, x2: 1000, y1: 40, y2: 40 }));
    for (const { step } of this.recordings.filter((r) => r.run === first.run && r.rank === first.rank)) {
      const kind = step === first.step ? "chosen" : "recorded";
      svg.append(drawn("line", { x1: x(step), x2: x(step), y1: 2, y2: 42, class: kind }));
    }
    for (const { label, bytes } of curves) {
      const known = steps.map((step, i) => [step, bytes[i]]).filter(([, n]) => n !== null);
      if (known.length === 1) known.push([known[0][0] + span / 100, known[0][1]]); // a line can be seen, a point cannot
      svg.append(drawn("polyline", { points: known.map(([step, n]) => x(step) + "," + y(n)).join(" "), stroke: COLOURS[label] }));
    }
    const key = curves.map((curve) => make("span", {}, make("i", { style: `background:${COLOURS[curve.label]}` }), `${curve.label} ${curve.words}`));
    this.trend.replaceChildren(make("b", {}, low === steps[steps.length - 1] ? `Step ${low}` : `Steps ${low} to ${steps[steps.length - 1]}`), svg, ...key);
  }

  shown() {
    if (!this.address) return;
    this.status.textContent = "";
    this.theme();
  }

  /** TensorBoard's switch is a class on the outer page's body. */
  isDark() {
    try { return parent.document.body.classList.contains("dark-mode"); } catch (error) { return false; }
  }

  followTheme() {
    this.theme();
    try { new MutationObserver(() => this.theme()).observe(parent.document.body, { attributeFilter: ["class"] }); } catch (error) { /* another origin: light */ }
  }

  theme() {
    const wanted = this.isDark() ? "dark" : "light";
    document.documentElement.classList.toggle("dark", wanted === "dark");
    const inside = this.frame.contentDocument;
    if (!inside || !inside.documentElement) return;
    // The report redraws its charts when its own switch is used.
    const button = inside.getElementById("theme");
    for (let i = 0; button && i < 3 && inside.documentElement.dataset.theme !== wanted; i++) button.click();
    if (!button) inside.documentElement.dataset.theme = wanted;
  }
}

export async function render() {
  await new Tab().load();
}
