// What every page's script uses, and the buttons of the header.
const root = document.documentElement;
root.classList.add("js");
const $$ = (id) => document.getElementById(id);
const all = (selector, inside) => Array.from((inside || document).querySelectorAll(selector));
const GIB = 2 ** 30;
/** A number with so many decimals; of two as near, the one with an even last digit, as Python has it. */
const fixed = (value, digits) => {
  const scaled = value * 10 ** digits, below = Math.floor(scaled);
  return (scaled - below === 0.5 && below % 2 === 0 ? below / 10 ** digits : value).toFixed(digits);
};
/** Bytes with their unit, as the page's text has them. */
const amountOf = (bytes) => {
  const mib = bytes / 2 ** 20;
  if (mib >= 1023.5) return fixed(bytes / GIB, 2) + " GiB";
  if (bytes >= 1023.5 * 1024) return fixed(mib, mib >= 99.95 ? 0 : mib >= 9.995 ? 1 : 2) + " MiB";
  return bytes >= 1024 ? fixed(bytes / 1024, 0) + " KiB" : bytes ? bytes + " B" : "0";
};
/** An SVG element with attributes and text. */
const SVG = "http://www.w3.org/2000/svg";
const svgElement = (tag, attributes, text) => {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
};
const colour = (name) => getComputedStyle(root).getPropertyValue("--c-" + name).trim() || "#8c9196";
const ink = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();

const unzip = (text) => {
  const letters = atob(text.trim()), packed = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) packed[i] = letters.charCodeAt(i);
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip")));
};
/** The report and the timeline: JSON, gzip'd, base64. */
const loaded = unzip($$("memprof-data").textContent).json();
/** plotly.js, inflated and run when a chart is first wanted: nothing before it waits for its megabytes. */
let plotly = null;
const withPlotly = () => (plotly ??= (async () => {
  const script = document.createElement("script");
  script.textContent = await unzip($$("plotly-source").textContent).text();
  document.head.append(script);
  return window.Plotly;
})());
/** Save a file under the page's name and its own. */
const saveAs = (name, blob) => {
  const url = URL.createObjectURL(blob), link = document.createElement("a");
  link.href = url;
  link.download = `${root.dataset.name}-${name}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
};
/** Run once the page is painted and nothing else is to do. */
const whenIdle = (action) => requestAnimationFrame(() => (window.requestIdleCallback ? requestIdleCallback(action, { timeout: 1000 }) : setTimeout(action, 50)));

// ---- header ---------------------------------------------------------------------------------------------------
const themes = ["auto", "light", "dark"];
let theme = 0;
const redrawers = [];
const showTheme = () => {
  if (themes[theme] === "auto") delete root.dataset.theme; else root.dataset.theme = themes[theme];
  $$("theme").textContent = "Theme: " + themes[theme];
  redrawers.forEach((redraw) => redraw());
};
$$("theme").addEventListener("click", () => { theme = (theme + 1) % themes.length; showTheme(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redrawers.forEach((redraw) => redraw()));
$$("print").addEventListener("click", () => window.print());
$$("download").addEventListener("click", async () => {
  const { report } = await loaded;
  const name = report.schema.replace(/^memprof\.(\w+).*/, "memprof-$1.json");
  saveAs(name, new Blob([JSON.stringify(report, null, 1)], { type: "application/json" }));
});
