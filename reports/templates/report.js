"use strict";
(async () => {
  const root = document.documentElement;
  root.classList.add("js");
  const $$ = (id) => document.getElementById(id);
  const all = (selector, inside) => Array.from((inside || document).querySelectorAll(selector));
  const GIB = 2 ** 30;
  const gib = (bytes) => (bytes > 0 && bytes < 0.005 * GIB ? "<0.01" : (bytes / GIB).toFixed(2));
  const colour = (name) => getComputedStyle(root).getPropertyValue("--c-" + name).trim() || "#8c9196";
  const ink = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();

  const unzip = (text) => {
    const packed = Uint8Array.from(atob(text.trim()), (c) => c.charCodeAt(0));
    return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip")));
  };
  /** The report and the timeline: JSON, gzip'd, base64. */
  const loaded = unzip($$("memprof-data").textContent).json();

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
    const url = URL.createObjectURL(new Blob([JSON.stringify(report, null, 1)], { type: "application/json" }));
    const link = document.createElement("a");
    link.href = url;
    link.download = report.schema.replace(/^memprof\.(\w+).*/, "memprof-$1.json");
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  });

  // ---- expandable rows ------------------------------------------------------------------------------------------
  const rows = all("tr[data-path]");
  const setOpen = (path, open) => {
    for (const row of rows.filter((r) => r.dataset.parent === path)) {
      row.hidden = !open;
      if (!open) setOpen(row.dataset.path, false);
    }
    const toggle = rows.find((r) => r.dataset.path === path).querySelector(".toggle");
    if (!toggle) return;
    toggle.textContent = open ? "▼" : "▶";
    toggle.setAttribute("aria-expanded", String(open));
  };
  for (const row of rows) {
    if (!rows.some((r) => r.dataset.parent === row.dataset.path)) continue;
    const toggle = document.createElement("button");
    toggle.type = "button";
    toggle.className = "toggle";
    const head = row.querySelector("th");
    toggle.setAttribute("aria-label", "Parts of " + head.textContent);
    toggle.addEventListener("click", () => setOpen(row.dataset.path, toggle.getAttribute("aria-expanded") !== "true"));
    head.prepend(toggle);
  }
  // Categories are worth seeing at once where they are few; their details open on demand.
  for (const row of rows) if (row.querySelector(".toggle")) setOpen(row.dataset.path, row.dataset.path === "training");

  // ---- allocations filter ---------------------------------------------------------------------------------------
  const filter = $$("filter");
  if (filter) {
    const lines = all("#allocation-table tbody tr").map((row) => [row, row.textContent.toLowerCase()]);
    const more = $$("more");
    let shown = 20;
    const show = () => {
      const wanted = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      lines.forEach(([row, text], i) => { row.hidden = wanted.length ? !wanted.every((word) => text.includes(word)) : i >= shown; });
      more.hidden = wanted.length > 0 || shown >= lines.length;
    };
    filter.addEventListener("input", show);
    more.textContent = "Show all " + lines.length + " lines";
    more.addEventListener("click", () => { shown = lines.length; show(); });
    show();
  }

  // ---- icicle: hide what is beside the way to the chosen box ----------------------------------------------------
  const icicle = $$("icicle-root");
  if (icicle) {
    icicle.addEventListener("click", (event) => {
      const box = event.target.closest(".box");
      if (!box) return;
      let chosen = box.parentElement;
      // The box that fills the width already: go one level up.
      if (chosen.dataset.zoomed === "yes") chosen = chosen.parentElement.closest(".node") || chosen;
      all(".node", icicle).forEach((node) => { node.classList.remove("off"); delete node.dataset.zoomed; });
      chosen.dataset.zoomed = "yes";
      for (let node = chosen; node.parentElement !== icicle; node = node.parentElement.closest(".node"))
        for (const sibling of node.parentElement.children) if (sibling !== node) sibling.classList.add("off");
    });
  }

  // ---- timeline -------------------------------------------------------------------------------------------------
  const { timeline: single, timelines = single ? [single] : [] } = await loaded;
  if (!timelines.length || typeof Plotly === "undefined") { root.dataset.ready = "yes"; return; }
  const chart = $$("chart"), cursor = $$("cursor"), plot = chart.parentElement;
  /** Columns of whole numbers: differences, eight planes of bytes each; scaled. */
  const unpack = async ({ points, n_points: n, columns }) => {
    const raw = new Uint8Array(await unzip(points).arrayBuffer()), found = {};
    columns.forEach((name, c) => {
      const [p0, p1, p2, p3, p4, p5, p6, p7] = Array.from({ length: 8 }, (_, b) => raw.subarray((8 * c + b) * n, (8 * c + b + 1) * n));
      const scale = { time: 1e6, phase: 1e6 }[name] || GIB, values = new Float64Array(n);
      for (let i = 0, sum = 0; i < n; i++) {
        const low = (p0[i] | (p1[i] << 8) | (p2[i] << 16) | (p3[i] << 24)) >>> 0;
        sum += low + (p4[i] | (p5[i] << 8) | (p6[i] << 16) | (p7[i] << 24)) * 4294967296;
        values[i] = sum / scale;
      }
      found[name] = values;
    });
    return found;
  };
  const prepared = await Promise.all(timelines.map(async (timeline) => {
    const columns = await unpack(timeline);
    timeline.axes = { time: columns.time, phase: columns.phase };
    const traces = timeline.figure.data.map((trace) => ({ ...trace, y: columns[trace.meta] }));
    const stacked = traces.filter((trace) => trace.stackgroup), lines = traces.filter((trace) => !trace.stackgroup);
    const nPoints = timeline.axes.time.length, total = new Float64Array(nPoints);
    for (const trace of stacked) for (let i = 0; i < nPoints; i++) total[i] += trace.y[i];
    const highest = [total, ...lines.map((trace) => trace.y)].reduce((top, ys) => ys.reduce((a, b) => Math.max(a, b), top), 0);
    return { timeline, traces, stacked, nPoints, total, highest };
  }));
  let { timeline, traces, stacked, nPoints, total } = prepared[0];
  // Several runs are drawn on one scale.
  const ceiling = prepared.length > 1 ? Math.max(...prepared.map((run) => run.highest)) * 1.06 || 1 : null;
  let axis = "phase", patterns = false, point = timeline.peak_point, held = false, view = null;
  const xs = () => timeline.axes[axis];
  const extent = () => { const x = xs(); return [x[0], x[nPoints - 1] > x[0] ? x[nPoints - 1] : x[0] + 1]; };

  /** First point at or after x (nPoints where there is none). */
  const from = (x) => {
    const values = xs();
    let low = 0, high = nPoints;
    while (low < high) { const middle = (low + high) >> 1; if (values[middle] < x) low = middle + 1; else high = middle; }
    return low;
  };

  /** For every pixel column the point with the highest total in it: [column starts, points]. */
  const peakHold = ([low, high], columns) => {
    const starts = [], points = [];
    for (let c = 0; c < columns; c++) {
      const start = low + ((high - low) * c) / columns;
      let best = from(start), stop = from(low + ((high - low) * (c + 1)) / columns);
      // The state the column begins with, where no point stands exactly there.
      if (best > 0 && (best === nPoints || xs()[best] > start)) best--;
      if (c === columns - 1) while (stop < nPoints && xs()[stop] <= high) stop++;
      for (let i = best + 1; i < stop; i++) if (total[i] > total[best]) best = i;
      if (points[points.length - 1] !== best) { starts.push(start); points.push(best); }
    }
    starts.push(high);
    points.push(points[points.length - 1]);
    return [starts, points];
  };

  const shapesAndLabels = ([low, high], width) => {
    const shapes = [], annotations = [], x = xs();
    const steps = new Map();
    for (const [phase, label, step, first, last, short] of timeline.spans) {
      if (step !== null) steps.set(step, [(steps.get(step) || [first])[0], last]);
      const x0 = Math.max(x[first], low), x1 = Math.min(x[last], high);
      if (x1 <= x0) continue;
      shapes.push({ type: "rect", xref: "x", yref: "paper", x0, x1, y0: 1.015, y1: 1.055, line: { width: 0 },
        fillcolor: timeline.phase_colours[phase] || "#8c9196" });
      const name = [label, short].find((n) => ((x1 - x0) / (high - low)) * width > 6.6 * n.length);
      if (name)
        annotations.push({ x: (x0 + x1) / 2, y: 1.06, xref: "x", yref: "paper", yanchor: "bottom", text: name.replace(/[<>&]/g, ""),
          showarrow: false, font: { size: 10.5, color: ink("soft") } });
    }
    for (const [step, [first, last]] of steps) {
      const x0 = Math.max(x[first], low), x1 = Math.min(x[last], high);
      if (((x1 - x0) / (high - low)) * width < 46) continue;
      const below = axis === "time" ? -0.085 : -0.005;
      shapes.push({ type: "line", xref: "x", yref: "paper", x0, x1: x0, y0: 0, y1: -0.05, line: { width: 1, color: ink("line") } });
      annotations.push({ x: (x0 + x1) / 2, y: below, xref: "x", yref: "paper", yanchor: "top", text: "step " + step, showarrow: false,
        font: { size: 10.5, color: ink("soft") } });
    }
    const px = x[timeline.peak_point];
    if (px >= low && px <= high)
      annotations.push({ x: px, y: total[timeline.peak_point], text: "<b>" + gib(total[timeline.peak_point] * GIB) + "</b> peak", showarrow: true,
        arrowhead: 0, arrowwidth: 1, arrowcolor: ink("soft"), ax: px > (low + high) / 2 ? -46 : 46, ay: -12, font: { size: 12, color: ink("ink") } });
    return { shapes, annotations };
  };

  const draw = () => {
    const range = view || extent();
    const width = Math.max(chart.clientWidth - 54, 100);
    const [starts, points] = peakHold(range, Math.round(width));
    const drawn = traces.map((trace) => {
      const shown = { ...trace, x: starts, y: points.map((p) => trace.y[p]) };
      if (trace.stackgroup) {
        shown.fillcolor = colour(trace.meta);
        const shape = patterns ? timeline.patterns[trace.meta] || "" : "";
        shown.fillpattern = { shape, bgcolor: colour(trace.meta), fgcolor: ink("bg"), size: 6, solidity: 0.25 };
      } else shown.line = { ...trace.line, color: ink("ink") };
      return shown;
    });
    const layout = { ...timeline.figure.layout, ...shapesAndLabels(range, width), height: chart.clientHeight, autosize: true,
      font: { color: ink("soft"), size: 11.5, family: getComputedStyle(document.body).fontFamily } };
    layout.xaxis = { ...layout.xaxis, range, autorange: false, showticklabels: axis === "time", ticksuffix: axis === "time" ? " s" : "" };
    layout.yaxis = { ...layout.yaxis, gridcolor: ink("line"), ...(ceiling ? { range: [0, ceiling] } : { autorange: true }) };
    return Plotly.react(chart, drawn, layout, { displayModeBar: false, showTips: false, responsive: true, doubleClick: false })
      .then(placeCursor);
  };

  const placeCursor = () => {
    const full = chart._fullLayout;
    const [low, high] = view || extent(), x = xs()[point];
    cursor.hidden = x < low || x > high;
    cursor.classList.toggle("held", held);
    cursor.style.left = full._size.l + ((x - low) / (high - low)) * full._size.w + "px";
    cursor.style.top = full._size.t + "px";
    cursor.style.height = full._size.h + "px";
  };

  const line = (name, label, value) => {
    const item = document.createElement("li"), swatch = document.createElement("i");
    swatch.className = "swatch c-" + name;
    const text = document.createElement("span"), bytes = document.createElement("b");
    text.textContent = text.title = label;
    bytes.textContent = value;
    item.append(swatch, text, bytes);
    return item;
  };

  const spanOf = (p) => timeline.spans.find((span) => span[3] <= p && p < span[4]);
  const seconds = (s) => (s < 1 ? (s * 1000).toFixed(1) + " ms" : s.toFixed(2) + " s");

  const showPanel = () => {
    const span = spanOf(point), time = timeline.axes.time[point];
    $$("panel-title").textContent = point === timeline.peak_point ? "Peak" : held ? "Held here" : "At the cursor";
    $$("panel-where").textContent = seconds(time) + (span ? " · " + span[1] + (span[2] === null ? "" : ", step " + span[2]) : "");
    $$("panel-total").textContent = gib(total[point] * GIB);
    const parts = stacked.map((t) => [t.meta, t.y[point] * GIB]).filter(([, n]) => n > 0).sort((a, b) => b[1] - a[1]);
    $$("panel-parts").replaceChildren(...parts.map(([name, n]) => line(name, timeline.labels[name] || name, gib(n))));
    const clock = timeline.clock_us + time * 1e6;
    const alive = [];
    for (const [label, category, each, lives, atPeak] of timeline.allocations) {
      const n = point === timeline.peak_point ? atPeak * lives.length
        : lives.filter(([born, died]) => (born === null || born <= clock) && (died === null || clock < died)).length;
      if (n) alive.push([category, n > 1 ? label + " ×" + n : label, n * each]);
    }
    alive.sort((a, b) => b[2] - a[2]);
    $$("panel-largest-title").textContent = point === timeline.peak_point ? "Largest alive" : "Largest known, alive here";
    $$("panel-largest").replaceChildren(...alive.slice(0, 7).map(([category, label, n]) => line(category, label, gib(n))));
  };

  const go = (p) => { point = Math.min(Math.max(p, 0), nPoints - 1); showPanel(); placeCursor(); };
  const zoom = (range) => {
    const [low, high] = extent();
    view = range && range[1] - range[0] < (high - low) * 0.999 ? [Math.max(range[0], low), Math.min(range[1], high)] : null;
    all('[data-choice="range"]').forEach((b) => b.setAttribute("aria-pressed", String((b.dataset.value === "all") === (view === null))));
    return draw();
  };
  const zoomBy = (factor) => {
    const [low, high] = view || extent(), centre = Math.min(Math.max(xs()[point], low), high);
    return zoom([centre - (centre - low) * factor, centre + (high - centre) * factor]);
  };
  const aroundPeak = () => {
    const span = spanOf(timeline.peak_point), x = xs();
    if (!span) return zoomBy(0.2);
    const low = x[span[3]], high = x[span[4]], pad = (high - low) * 0.6;
    return zoom([low - pad, high + pad]);
  };
  const pointAt = (event) => {
    const full = chart._fullLayout, [low, high] = view || extent();
    const share = (event.clientX - chart.getBoundingClientRect().left - full._size.l) / full._size.w;
    if (share < 0 || share > 1) return null;
    const columns = Math.round(full._size.w), column = Math.min(Math.floor(share * columns), columns - 1);
    const [starts, points] = peakHold([low + ((high - low) * column) / columns, low + ((high - low) * (column + 1)) / columns], 1);
    return starts.length ? points[0] : null;
  };

  let pressed = null;
  chart.addEventListener("mousemove", (event) => {
    if (held || pressed) return;
    const p = pointAt(event);
    if (p !== null) go(p);
  });
  chart.addEventListener("mousedown", (event) => { pressed = [event.clientX, event.clientY]; }, true);
  window.addEventListener("mouseup", (event) => {
    if (!pressed) return;
    const moved = Math.hypot(event.clientX - pressed[0], event.clientY - pressed[1]);
    pressed = null;
    // Plotly lays a cover over the page while a button is down, so the place counts, not the target.
    const p = moved < 4 ? pointAt(event) : null;
    if (p === null) return;
    held = !held;
    go(p);
  }, true);
  chart.addEventListener("mouseleave", () => { if (!held) go(timeline.peak_point); });
  chart.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const jump = (direction) => {
      const starts = timeline.spans.map((span) => span[3]);
      const next = direction > 0 ? starts.find((s) => s > point) : starts.reverse().find((s) => s < point);
      if (next !== undefined) go(next);
    };
    // A step that can be seen: about a pixel's worth of points.
    const [left, right] = view || extent(), seen = from(right) - from(left);
    const stride = Math.max(1, Math.round(seen / 800)) * (event.shiftKey ? 20 : 1);
    const actions = {
      ArrowLeft: () => go(point - stride), ArrowRight: () => go(point + stride), "[": () => jump(-1), "]": () => jump(1),
      p: () => go(timeline.peak_point), P: () => go(timeline.peak_point), "+": () => zoomBy(0.5), "=": () => zoomBy(0.5), "-": () => zoomBy(2),
      Escape: () => { held = false; placeCursor(); }, Home: () => go(0), End: () => go(nPoints - 1),
    };
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    if (event.key !== "Escape") held = true;
    action();
  });
  const show = (index) => {
    ({ timeline, traces, stacked, nPoints, total } = prepared[index]);
    point = timeline.peak_point;
    held = false;
    zoom(null);
    showPanel();
  };
  const choose = { run: (value) => show(Number(value)), axis: (value) => { axis = value; zoom(null); go(point); }, range: (value) => (value === "all" ? zoom(null) : aroundPeak()) };
  for (const button of all("[data-choice]"))
    button.addEventListener("click", () => {
      all(`[data-choice="${button.dataset.choice}"]`).forEach((b) => b.setAttribute("aria-pressed", String(b === button)));
      choose[button.dataset.choice](button.dataset.value);
    });
  $$("patterns").addEventListener("click", () => {
    patterns = !patterns;
    $$("patterns").setAttribute("aria-pressed", String(patterns));
    root.dataset.patterns = patterns ? "on" : "off";
    draw();
  });

  plot.classList.add("drawn");
  draw().then(() => {
    chart.on("plotly_relayout", (change) => {
      if (change["xaxis.range[0]"] === undefined) return;
      zoom([Number(change["xaxis.range[0]"]), Number(change["xaxis.range[1]"])]);
    });
    chart.on("plotly_doubleclick", () => zoom(null));
    redrawers.push(draw);
    let width = chart.clientWidth;
    new ResizeObserver(() => { if (chart.clientWidth !== width && chart.clientWidth) { width = chart.clientWidth; draw(); } }).observe(chart);
    showPanel();
    root.dataset.ready = "yes";
  });
})();
