// The chart of memory against time: a point for each row, the front as a line, the card's limit.
const { front } = await loaded;
const prices = $$("front-chart");
if (front && prices && typeof Plotly !== "undefined") {
  const clean = (text) => text.replace(/[<>&]/g, "");
  const points = front.points, line = points.filter((p) => p.on_front).sort((a, b) => a.bytes - b.bytes);
  const least = Math.min(front.limit, ...points.map((p) => p.bytes)), most = Math.max(front.limit, ...points.map((p) => p.bytes));
  const longest = Math.max(...points.map((p) => p.seconds)), [scale, unit] = longest < 1 ? [1000, "ms"] : [1, "s"];
  const log = most > 4 * least, low = log ? Math.log10((least / GIB) * 0.8) : 0, high = log ? Math.log10((most / GIB) * 1.2) : (most / GIB) * 1.08;
  const place = (bytes) => (log ? Math.log10(bytes / GIB) : bytes / GIB), top = longest * scale * 1.2;
  const ticks = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 128, 192, 256, 384, 512, 1024].filter((n) => Math.log10(n) >= low && Math.log10(n) <= high);
  const margin = { l: 56, r: 14, t: 26, b: 46 };
  /** Names beside the points, the fastest first; one that would lie on another or on a point is left to its hover label. */
  const named = () => {
    const width = prices.clientWidth - margin.l - margin.r, height = prices.clientHeight - margin.t - margin.b;
    const px = (p) => ((place(p.bytes) - low) / (high - low)) * width, py = (p) => height - ((p.seconds * scale) / top) * height;
    const taken = points.map((p) => [px(p) - 8, py(p) - 8, px(p) + 8, py(p) + 8]), found = [];
    const wanted = [...points].sort((a, b) => b.fastest - a.fastest || b.on_front - a.on_front);
    for (const p of wanted) {
      const name = clean(p.name), texts = p.fastest ? ["fastest that fits: " + name, "fastest that fits", name] : [name];
      const sides = [["left", 11, 0], ["right", -11, 0], ["left", 2, -17], ["right", -2, -17], ["left", 2, 17], ["right", -2, 17]];
      for (const [text, [xanchor, dx, dy]] of texts.flatMap((text) => sides.map((side) => [text, side]))) {
        const wide = text.length * 6.1;
        const x0 = px(p) + dx - (xanchor === "right" ? wide : 0), y0 = py(p) + dy - 7, box = [x0, y0, x0 + wide, y0 + 14];
        if (box[0] < 0 || box[2] > width || box[1] < 0 || box[3] > height) continue;
        if (taken.some(([a, b, c, d]) => box[0] < c && a < box[2] && box[1] < d && b < box[3])) continue;
        taken.push(box);
        found.push({ x: place(p.bytes), y: p.seconds * scale, text, xanchor, xshift: dx, yshift: -dy, showarrow: false, font: { size: 11.5, color: ink(p.fastest ? "ink" : "soft") } });
        break;
      }
    }
    return found;
  };
  const dots = (chosen, mark) => ({ type: "scatter", mode: "markers", x: chosen.map((p) => p.bytes / GIB), y: chosen.map((p) => p.seconds * scale),
    hovertemplate: chosen.map((p) => `<b>${clean(p.name)}</b><br>${p.lines.map(clean).join("<br>")}<extra></extra>`),
    marker: { size: chosen.map((p) => (p.fastest ? 15 : 11)), opacity: 1, line: { width: 1.5, color: mark }, color: chosen.map((p) => (p.on_front ? mark : ink("bg"))) } });
  const drawPrices = () => {
    const path = { type: "scatter", mode: "lines", x: line.map((p) => p.bytes / GIB), y: line.map((p) => p.seconds * scale), hoverinfo: "skip",
      line: { color: ink("soft"), width: 1.5, dash: "dot" } };
    const limit = front.limit / GIB, end = log ? 10 ** high : high;
    const label = { x: place(front.limit), y: 1, xref: "x", yref: "paper", text: "limit " + amountOf(front.limit), showarrow: false, yanchor: "bottom",
      xanchor: place(front.limit) > (low + high) / 2 ? "right" : "left", font: { size: 11.5, color: ink("bad") } };
    const axis = { gridcolor: ink("line"), zeroline: false, fixedrange: true };
    const layout = { width: prices.clientWidth, height: prices.clientHeight, margin, showlegend: false, hovermode: "closest",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", annotations: [...named(), label],
      font: { color: ink("soft"), size: 11.5, family: getComputedStyle(document.body).fontFamily },
      hoverlabel: { align: "left", bgcolor: ink("bg"), bordercolor: ink("soft"), font: { color: ink("ink"), size: 12.5 } },
      xaxis: { ...axis, title: { text: "memory needed, GiB" }, type: log ? "log" : "linear", range: [low, high], ...(log ? { tickvals: ticks, ticktext: ticks.map(String) } : {}) },
      yaxis: { ...axis, title: { text: `${front.per}, ${unit}` }, range: [0, top] },
      shapes: [{ type: "rect", xref: "x", yref: "paper", x0: limit, x1: end, y0: 0, y1: 1, line: { width: 0 }, fillcolor: ink("faint"), layer: "below" },
        { type: "line", xref: "x", yref: "paper", x0: limit, x1: limit, y0: 0, y1: 1, line: { width: 1.5, color: ink("bad") } }] };
    const drawn = [path, dots(points.filter((p) => !p.fits), ink("soft")), dots(points.filter((p) => p.fits), ink("good"))];
    return Plotly.react(prices, drawn, layout, { displayModeBar: false, showTips: false, doubleClick: false });
  };
  await drawPrices();
  redrawers.push(drawPrices);
  let drawnAt = prices.clientWidth;
  new ResizeObserver(() => {
    if (prices.clientWidth === drawnAt || !prices.clientWidth) return;
    drawnAt = prices.clientWidth;
    drawPrices();
  }).observe(prices);
}
