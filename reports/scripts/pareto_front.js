// The chart of memory against time: plotly's figure of the plan in the page's colours, its points named where there is room.
const { front } = await loaded;
const prices = $$("front-chart");
const startFront = async () => {
  const Plotly = await withPlotly(), [path, ...dots] = front.data, { layout } = front;
  const [low, high] = layout.xaxis.range, top = layout.yaxis.range[1], log = layout.xaxis.type === "log", { margin } = layout;
  const place = (gib) => (log ? Math.log10(gib) : gib);
  const points = dots.flatMap((trace) => trace.customdata.map(([name, onFront, fastest], i) => ({ name, onFront, fastest, x: place(trace.x[i]), y: trace.y[i] })));
  /** Names beside the points, the fastest first; one that would lie on another or on a point is left to its hover label. */
  const named = () => {
    const width = prices.clientWidth - margin.l - margin.r, height = prices.clientHeight - margin.t - margin.b;
    const px = (p) => ((p.x - low) / (high - low)) * width, py = (p) => height - (p.y / top) * height;
    const taken = points.map((p) => [px(p) - 8, py(p) - 8, px(p) + 8, py(p) + 8]), found = [];
    const wanted = [...points].sort((a, b) => b.fastest - a.fastest || b.onFront - a.onFront);
    for (const p of wanted) {
      const texts = p.fastest ? ["fastest that fits: " + p.name, "fastest that fits", p.name] : [p.name];
      const sides = [["left", 11, 0], ["right", -11, 0], ["left", 2, -17], ["right", -2, -17], ["left", 2, 17], ["right", -2, 17]];
      for (const [text, [xanchor, dx, dy]] of texts.flatMap((text) => sides.map((side) => [text, side]))) {
        const wide = text.length * 6.1;
        const x0 = px(p) + dx - (xanchor === "right" ? wide : 0), y0 = py(p) + dy - 7, box = [x0, y0, x0 + wide, y0 + 14];
        if (box[0] < 0 || box[2] > width || box[1] < 0 || box[3] > height) continue;
        if (taken.some(([a, b, c, d]) => box[0] < c && a < box[2] && box[1] < d && b < box[3])) continue;
        taken.push(box);
        found.push({ x: p.x, y: p.y, text, xanchor, xshift: dx, yshift: -dy, showarrow: false, font: { size: 11.5, color: ink(p.fastest ? "ink" : "soft") } });
        break;
      }
    }
    return found;
  };
  const drawPrices = () => {
    const coloured = dots.map((trace) => {
      const mark = ink(trace.meta), color = trace.customdata.map(([, onFront]) => (onFront ? mark : ink("bg")));
      return { ...trace, mode: "markers", marker: { ...trace.marker, color, line: { ...trace.marker.line, color: mark } } };
    });
    const axis = { gridcolor: ink("line") };
    const drawn = { ...layout, width: prices.clientWidth, height: prices.clientHeight,
      font: { color: ink("soft"), size: 11.5, family: getComputedStyle(document.body).fontFamily },
      hoverlabel: { ...layout.hoverlabel, bgcolor: ink("bg"), bordercolor: ink("soft"), font: { color: ink("ink"), size: 12.5 } },
      xaxis: { ...layout.xaxis, ...axis }, yaxis: { ...layout.yaxis, ...axis },
      annotations: [...named(), ...layout.annotations.map((label) => ({ ...label, font: { ...label.font, color: ink(label.name) } }))],
      shapes: layout.shapes.map((shape) => (shape.type === "rect" ? { ...shape, fillcolor: ink(shape.name) } : { ...shape, line: { ...shape.line, color: ink(shape.name) } })) };
    return Plotly.react(prices, [{ ...path, line: { ...path.line, color: ink(path.meta) } }, ...coloured], drawn, { displayModeBar: false, showTips: false, doubleClick: false });
  };
  await drawPrices();
  root.dataset.charts = "yes";
  redrawers.push(drawPrices);
  let drawnAt = prices.clientWidth;
  new ResizeObserver(() => {
    if (prices.clientWidth === drawnAt || !prices.clientWidth) return;
    drawnAt = prices.clientWidth;
    drawPrices();
  }).observe(prices);
};
if (front && prices) whenIdle(startFront);
