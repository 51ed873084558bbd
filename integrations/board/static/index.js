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

class Tab {
  constructor() {
    this.recordings = [];
    this.picks = [this.picker("Run", "first"), this.picker("Compare with", "second")];
    this.refresh = make("button", { type: "button", id: "refresh" }, "Refresh");
    this.status = make("output", { "aria-live": "polite" });
    this.frame = make("iframe", { title: "memprof report" });
    this.empty = make("div", { class: "empty" }, ...EMPTY.map((words) => make("p", {}, words)));
    const form = make("form", {}, ...this.picks.map((pick) => pick.element), this.refresh, this.status);
    form.addEventListener("submit", (event) => event.preventDefault());
    document.head.append(make("style", {}, STYLE));
    document.body.append(form, this.empty, this.frame);
    this.refresh.addEventListener("click", () => this.load(true));
    this.frame.addEventListener("load", () => this.shown());
    this.followTheme();
  }

  /** Three selects: run, step, rank. */
  picker(label, id) {
    const selects = ["run", "step", "rank"].map((part) =>
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
    ["run", "step", "rank"].forEach((part, i) => {
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
    const told = among.filter((r) => String(r.step) === value && r.verdict).sort((a, b) => b.peak_bytes - a.peak_bytes);
    return "step " + value + (told.length ? " · " + told[0].verdict : "");
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
    this.frame.hidden = this.recordings.length === 0;
    this.show(again);
  }

  show(again = false) {
    const [first, second] = this.picks.map((pick) => pick.chosen);
    if (!first) return;
    const named = (recording, prefix) => ({
      [prefix + "run"]: recording.run, [prefix + "step"]: recording.step, [prefix + "rank"]: recording.rank,
    });
    const address = second ? url("compare", { ...named(first, "a_"), ...named(second, "b_") }) : url("page", named(first, ""));
    address.searchParams.set("changed", Math.max(first.changed, second ? second.changed : 0));
    if (this.address === String(address) && !again) return;
    this.address = String(address);
    this.status.textContent = "Reading " + (second ? "two recordings" : "the recording") + " …";
    // The place in the browser's history is TensorBoard's.
    this.frame.contentWindow.location.replace(this.address);
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
