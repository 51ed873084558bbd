// The chart, its cursor and its panel: over the static pictures first, over plotly's chart once that is drawn.
const { timeline: single, timelines = single ? [single] : [] } = await loaded;
const chart = $$("chart"), cursor = $$("cursor"), plot = chart.parentElement, pictures = all(".picture svg", plot);
/** Columns of whole numbers: differences, eight planes of bytes each; scaled. */
const unpack = async ({ points, n_points: n, columns }, scaleOf) => {
  const raw = new Uint8Array(await unzip(points).arrayBuffer()), found = {};
  columns.forEach((name, c) => {
    const [p0, p1, p2, p3, p4, p5, p6, p7] = Array.from({ length: 8 }, (_, b) => raw.subarray((8 * c + b) * n, (8 * c + b + 1) * n));
    const scale = scaleOf(name), values = new Float64Array(n);
    for (let i = 0, sum = 0; i < n; i++) {
      const low = (p0[i] | (p1[i] << 8) | (p2[i] << 16) | (p3[i] << 24)) >>> 0;
      sum += low + (p4[i] | (p5[i] << 8) | (p6[i] << 16) | (p7[i] << 24)) * 4294967296;
      values[i] = sum / scale;
    }
    found[name] = values;
  });
  return found;
};
/** The allocations that are drawn one by one, each with its first point and the first one after it; null without. */
const individualOf = async (timeline) => {
  const found = timeline.individual, events = timeline.axes.event;
  if (!found) return null;
  const columns = await unpack(found, () => 1), n = found.n_points, birth = new Int32Array(n), death = new Int32Array(n);
  const after = (event) => {
    let low = 0, high = events.length;
    while (low < high) { const middle = (low + high) >> 1; if (events[middle] <= event) low = middle + 1; else high = middle; }
    return low;
  };
  for (let i = 0; i < n; i++) { birth[i] = after(columns.begin[i]); death[i] = after(columns.end[i]); }
  const categoryOf = (i) => found.groups[columns.group[i]][1];
  return { ...found, ...columns, n, birth, death, categoryOf, alive: (i, p) => birth[i] <= p && p < death[i] };
};
const prepared = await Promise.all(timelines.map(async (timeline) => {
  const columns = await unpack(timeline, (name) => ({ event: 1, time: timeline.unit, phase: 1e6 })[name] || GIB);
  timeline.axes = { event: columns.event, time: columns.time, phase: columns.phase };
  const traces = timeline.figure.data.map((trace) => ({ ...trace, y: columns[trace.meta] }));
  const stacked = traces.filter((trace) => trace.stackgroup), lines = traces.filter((trace) => !trace.stackgroup);
  const nPoints = timeline.axes.time.length, total = new Float64Array(nPoints);
  for (const trace of stacked) for (let i = 0; i < nPoints; i++) total[i] += trace.y[i];
  const highest = [total, ...lines.map((trace) => trace.y)].reduce((top, ys) => ys.reduce((a, b) => Math.max(a, b), top), 0);
  const [, top] = timeline.figure.layout.yaxis.range || [0, 0];
  return { timeline, traces, stacked, nPoints, total, highest: Math.max(highest, top / 1.06), bands: await individualOf(timeline) };
}));
let { timeline, traces, stacked, nPoints, total, bands } = prepared[0];
/** What follows the cursor, and what draws and answers when the timeline shows single allocations (bands.js). */
const followers = [], byAllocation = { draw: null, frame: null, keys: {}, press: null };
// Several runs are drawn on one scale.
const ceiling = prepared.length > 1 ? Math.max(...prepared.map((run) => run.highest)) * 1.06 || 1 : null;
const visible = (trace) => !state.hidden.has(trace.meta);
/** The sum of what is shown, at every point. */
const addUp = (run) => {
  const sums = new Float64Array(run.nPoints);
  for (const trace of run.stacked.filter(visible)) for (let i = 0; i < run.nPoints; i++) sums[i] += trace.y[i];
  return sums;
};
let by = "category", axis = "phase", patterns = false, point = timeline.peak_point, held = false, view = null;
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

/** The peak; where categories are hidden, the highest moment of the others. */
const highestPoint = () => {
  if (!state.hidden.size) return timeline.peak_point;
  let top = 0;
  for (let i = 1; i < nPoints; i++) if (total[i] > total[top]) top = i;
  return top;
};

/** The figure's boxes of the phases that are in view, and labels where they fit. */
const shapesAndLabels = ([low, high], width) => {
  const shapes = [], annotations = [], x = xs(), boxes = timeline.figure.layout.shapes || [];
  const steps = new Map();
  timeline.spans.forEach(([, label, step, first, last, short], i) => {
    if (step !== null) steps.set(step, [(steps.get(step) || [first])[0], last]);
    const x0 = Math.max(x[first], low), x1 = Math.min(x[last], high);
    if (x1 <= x0) return;
    shapes.push({ ...boxes[i], x0, x1 });
    const name = [label, short].find((n) => ((x1 - x0) / (high - low)) * width > 6.6 * n.length);
    if (name)
      annotations.push({ x: (x0 + x1) / 2, y: 1.06, xref: "x", yref: "paper", yanchor: "bottom", text: name.replace(/[<>&]/g, ""),
        showarrow: false, font: { size: 10.5, color: ink("soft") } });
  });
  for (const [step, [first, last]] of steps) {
    const x0 = Math.max(x[first], low), x1 = Math.min(x[last], high);
    if (((x1 - x0) / (high - low)) * width < 46) continue;
    const below = axis !== "phase" ? -0.085 : -0.005;
    shapes.push({ type: "line", xref: "x", yref: "paper", x0, x1: x0, y0: 0, y1: -0.05, line: { width: 1, color: ink("line") } });
    annotations.push({ x: (x0 + x1) / 2, y: below, xref: "x", yref: "paper", yanchor: "top", text: "step " + step, showarrow: false,
      font: { size: 10.5, color: ink("soft") } });
  }
  const top = highestPoint(), px = x[top], words = state.hidden.size ? "</b> the most of these" : "</b> peak";
  // Where the line of reserved memory runs close above the peak, the label stands below that line.
  const reserved = traces.find((trace) => !trace.stackgroup), scaled = (ceiling || highestOf()) / Math.max(chart.clientHeight - 82, 50);
  const near = reserved && !state.hidden.size && (reserved.y[top] - total[top]) / scaled < 26;
  if (px >= low && px <= high)
    annotations.push({ ...timeline.figure.layout.annotations[0], x: px, y: total[top], text: "<b>" + amountOf(total[top] * GIB) + words,
      arrowcolor: ink("soft"), bgcolor: ink("bg"), ax: px > (low + high) / 2 ? -46 : 46, ...(near ? { ay: 16 } : {}), font: { size: 12, color: ink("ink") } });
  // The GPU's capacity and the request that failed, as the figure has them.
  const marked = ({ name }) => name === "capacity" || (name === "request" && x[timeline.failed_point] >= low && x[timeline.failed_point] <= high);
  for (const box of boxes.filter(marked))
    shapes.push({ ...box, ...(box.name === "request" ? { x0: x[timeline.failed_point], x1: x[timeline.failed_point] } : {}), line: { ...box.line, color: ink("bad") } });
  for (const label of timeline.figure.layout.annotations.filter(marked)) {
    const right = x[timeline.failed_point] > (low + high) / 2;
    annotations.push({ ...label, font: { ...label.font, color: ink("bad") }, bgcolor: ink("bg"),
      ...(label.name === "request" ? { x: x[timeline.failed_point], xanchor: right ? "right" : "left", xshift: right ? -6 : 6 } : {}) });
  }
  return { shapes, annotations };
};

const highestOf = () => prepared[state.run]?.highest * 1.06 || 1;

const drawChart = () => {
  const range = view || extent();
  const width = Math.max(chart.clientWidth - 54, 100);
  const [starts, points] = peakHold(range, Math.round(width));
  const drawn = traces.filter((trace) => (trace.stackgroup ? visible(trace) : !state.hidden.size)).map((trace) => {
    const shown = { ...trace, x: starts, y: points.map((p) => trace.y[p]) };
    if (trace.stackgroup) {
      shown.fillcolor = colour(trace.meta);
      const shape = patterns ? timeline.patterns[trace.meta] || "" : "";
      shown.fillpattern = { shape, bgcolor: colour(trace.meta), fgcolor: ink("bg"), size: 6, solidity: 0.25 };
    } else shown.line = { ...trace.line, color: ink("ink") };
    return shown;
  });
  const layout = { ...timeline.figure.layout, ...shapesAndLabels(range, width), width: chart.clientWidth, height: chart.clientHeight, hovermode: false,
    font: { color: ink("soft"), size: 11.5, family: getComputedStyle(document.body).fontFamily } };
  layout.xaxis = { ...layout.xaxis, range, autorange: false, showticklabels: axis !== "phase", ticksuffix: axis === "time" && timeline.timed ? " s" : "" };
  layout.yaxis = { ...layout.yaxis, gridcolor: ink("line"), ...(ceiling || layout.yaxis.range ? { range: [0, ceiling || layout.yaxis.range[1]] } : { autorange: true }) };
  return Plotly.react(chart, drawn, layout, { displayModeBar: false, showTips: false, doubleClick: false })
    .then(placeCursor);
};
/** Put plotly's chart in the static pictures' place. */
let drawn = false, starting = null;
const start = () => (starting ??= withPlotly().then(async () => {
  drawn = true;
  plot.classList.add("drawn");
  await drawChart();
  chart.on("plotly_relayout", (change) => {
    if (change["xaxis.range[0]"] === undefined) return;
    zoom([Number(change["xaxis.range[0]"]), Number(change["xaxis.range[1]"])]);
  });
  chart.on("plotly_doubleclick", () => zoom(null));
  root.dataset.charts = "yes";
}));
/** The static pictures show the whole run by phase; anything else needs the chart. */
const draw = () => (by === "allocation" ? (byAllocation.draw(), placeCursor()) : drawn ? drawChart() : view || axis !== "phase" || patterns || state.hidden.size ? start() : placeCursor());

/** Where the axes are in the plot's box, in pixels. */
const frame = () => {
  if (by === "allocation") return byAllocation.frame();
  if (drawn) { const { l, t, w, h } = chart._fullLayout._size; return { left: l, top: t, width: w, height: h }; }
  const picture = pictures[state.run] || pictures[0], [left, right, top, bottom] = picture.dataset.axes.split(" ").map(Number);
  const box = picture.getBoundingClientRect(), at = plot.getBoundingClientRect(), scale = box.width / picture.viewBox.baseVal.width;
  return { left: box.left - at.left + left * scale, top: box.top - at.top + top * scale, width: (right - left) * scale, height: (bottom - top) * scale };
};
const placeCursor = () => {
  const { left, top, width, height } = frame(), [low, high] = view || extent(), x = xs()[point];
  cursor.hidden = x < low || x > high;
  cursor.classList.toggle("held", held);
  cursor.style.left = left + ((x - low) / (high - low)) * width + "px";
  cursor.style.top = top + "px";
  cursor.style.height = height + "px";
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
/** A line that opens what is known of an allocation. */
const openLine = (name, label, value, reference, inferred) => {
  const item = line(name, label, value);
  if (inferred) { item.firstChild.classList.add("guess"); item.children[1].title += ", inferred"; }
  if (!reference) return item;
  const button = make("button", "plain-button");
  button.type = "button";
  button.dataset.open = reference;
  button.append(...item.childNodes);
  item.append(button);
  return item;
};
/** A line that shows its category alone. */
const partLine = (name, label, value) => {
  const item = line(name, label, value), button = pressable("plain-button", () => isolate(name));
  button.title = "Show only this; again for all";
  button.append(...item.childNodes);
  item.append(button);
  return item;
};

const spanOf = (p) => timeline.spans.find((span) => span[3] <= p && p < span[4]);
/** How long so many microseconds are, in the digits of the page's tables. */
const lasting = (us) => {
  if (us < 1000) return Math.round(us) + " µs";
  const [value, unit] = us < 1e6 ? [us / 1000, "ms"] : [us / 1e6, "s"];
  return fixed(value, value < 100 ? 1 : 0) + " " + unit;
};
const seconds = (s) => (!timeline.timed ? "event " + Math.round(s) : s < 1 ? (s * 1000).toFixed(1) + " ms" : s.toFixed(2) + " s");

const showPanel = () => {
  const span = spanOf(point), time = timeline.axes.time[point];
  $$("panel-title").textContent = point === timeline.peak_point ? "Peak" : held ? "At this moment" : "At the cursor";
  $$("panel-where").textContent = seconds(time) + (span ? " · " + span[1] + (span[2] === null ? "" : ", step " + span[2]) : "");
  $$("panel-total").textContent = amountOf(total[point] * GIB);
  const parts = stacked.filter(visible).map((t) => [t.meta, t.y[point] * GIB]).filter(([, n]) => n > 0).sort((a, b) => b[1] - a[1]);
  $$("panel-parts").replaceChildren(...parts.map(([name, n]) => partLine(name, timeline.labels[name] || name, amountOf(n))));
  const clock = timeline.clock_us + time * timeline.unit;
  const alive = [];
  for (const [label, category, each, lives, atPeak, reference, inferred] of timeline.allocations) {
    if (state.hidden.has(category)) continue;
    const n = point === timeline.peak_point ? atPeak * lives.length
      : lives.filter(([born, died]) => (born === null || born <= clock) && (died === null || clock < died)).length;
    if (n) alive.push([category, n > 1 ? label + " ×" + n : label, n * each, reference, inferred]);
  }
  alive.sort((a, b) => b[2] - a[2]);
  $$("panel-largest-title").textContent = point === timeline.peak_point ? "Largest alive" : "Largest known, alive here";
  $$("panel-largest").replaceChildren(...alive.slice(0, 7).map(([category, label, n, reference, inferred]) => openLine(category, label, amountOf(n), reference, inferred)));
};

/** A held instant in the page's address: its tick of the clock, and which of the points at that tick it is. */
const instant = (p) => {
  const times = timeline.axes.time, us = Math.round(times[p] * timeline.unit);
  let n = 0;
  while (p > n && Math.round(times[p - n - 1] * timeline.unit) === us) n++;
  return us + (n ? "." + n : "");
};
const pointOf = (words) => {
  const [us, n = "0"] = words.split("."), times = timeline.axes.time;
  let low = 0, high = nPoints;
  while (low < high) { const middle = (low + high) >> 1; if (Math.round(times[middle] * timeline.unit) < Number(us)) low = middle + 1; else high = middle; }
  return Math.min(low + Number(n), nPoints - 1);
};
const go = (p) => {
  point = Math.min(Math.max(p, 0), nPoints - 1);
  if (held || state.at !== null) { state.at = held ? instant(point) : null; writeAddress(); }
  showPanel();
  placeCursor();
  followers.forEach((follow) => follow());
};
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
  const { left, width } = frame(), [low, high] = view || extent();
  const share = (event.clientX - plot.getBoundingClientRect().left - left) / width;
  if (share < 0 || share > 1) return null;
  const columns = Math.round(width), column = Math.min(Math.floor(share * columns), columns - 1);
  const [starts, points] = peakHold([low + ((high - low) * column) / columns, low + ((high - low) * (column + 1)) / columns], 1);
  return starts.length ? points[0] : null;
};

let pressed = null;
chart.addEventListener("mousemove", (event) => {
  if (held || pressed) return;
  // Of several static pictures the one below the pointer answers.
  const below = drawn || by === "allocation" ? -1 : pictures.findIndex((picture) => { const box = picture.getBoundingClientRect(); return box.top <= event.clientY && event.clientY < box.bottom; });
  if (below >= 0 && below !== state.run) { show(below); markRun(); }
  const p = pointAt(event);
  if (p !== null) go(p);
});
chart.addEventListener("mousedown", (event) => { pressed = [event.clientX, event.clientY]; if (by === "allocation") event.preventDefault(); }, true);
window.addEventListener("mouseup", (event) => {
  if (!pressed) return;
  const moved = Math.hypot(event.clientX - pressed[0], event.clientY - pressed[1]), [fromX] = pressed;
  pressed = null;
  if (by === "allocation") { chart.focus(); byAllocation.press(event, moved < 4 ? null : fromX); return; }
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
    Escape: () => { if (by === "allocation" && byAllocation.keys.Escape()) return; held = false; go(point); }, Home: () => go(0), End: () => go(nPoints - 1),
  };
  const action = actions[event.key] || (by === "allocation" && byAllocation.keys[event.key]);
  if (!action) return;
  event.preventDefault();
  if (event.key !== "Escape") held = true;
  action();
});
const show = (index, range = null) => {
  ({ timeline, traces, stacked, nPoints, total, bands } = prepared[index]);
  state.run = index;
  total = addUp(prepared[index]);
  held = state.at !== null;
  point = held ? pointOf(state.at) : timeline.peak_point;
  showPanel();
  followers.forEach((follow) => follow());
  return zoom(range);
};
const note = $$("axis-note"), showNote = () => { if (note.dataset.time) note.textContent = note.dataset[axis]; };
const choose = {
  by: (value) => { by = state.by = value; plot.classList.toggle("by-allocation", by === "allocation"); writeAddress(); draw(); followers.forEach((follow) => follow()); },
  run: (value) => { state.at = null; show(Number(value)); writeAddress(); }, axis: (value) => { axis = value; zoom(null); go(point); showNote(); }, range: (value) => (value === "all" ? zoom(null) : aroundPeak()) };
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

const markRun = () => all('[data-choice="run"]').forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.value === String(state.run))));
/** Show what the address says, and categories that were hidden or shown meanwhile. */
const restore = () => {
  const shown = show(Math.min(Math.max(state.run, 0), prepared.length - 1), view);
  markRun();
  return shown;
};
watchers.push(restore);
restore();
redrawers.push(draw);
whenIdle(start);
let drawnWidth = chart.clientWidth;
new ResizeObserver(() => {
  if (chart.clientWidth === drawnWidth || !chart.clientWidth) return;
  drawnWidth = chart.clientWidth;
  if (by === "allocation") draw();
  else if (drawn) drawChart(); else placeCursor();
}).observe(chart);
