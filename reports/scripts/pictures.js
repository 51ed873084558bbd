// Each picture as SVG or PNG: plotly's by plotly, everything else from what the browser has laid out.
const drawnIn = (parent, ...made) => {
  const element = svgElement(...made);
  parent.append(element);
  return element;
};
const isClear = (paint) => paint === "transparent" || /^rgba\(.*, 0\)$/.test(paint);
const hasSize = (box) => box.width > 0.05 && box.height > 0.05;
const INHERITED = ["fill", "stroke", "stroke-width", "stroke-dasharray", "paint-order", "font-size", "font-weight", "font-family", "text-anchor", "opacity"];
/** A copy of an SVG picture that needs no style sheet. */
const standalone = (picture) => {
  const copy = picture.cloneNode(true), from = [picture, ...picture.querySelectorAll("*")];
  [copy, ...copy.querySelectorAll("*")].forEach((element, i) => {
    const style = getComputedStyle(from[i]);
    for (const name of INHERITED) element.style.setProperty(name, style.getPropertyValue(name));
  });
  return copy;
};
/** Draw boxes and words of an element as an SVG, at their places on the page. */
const svgOf = (target) => {
  const frame = target.getBoundingClientRect(), at = (box) => ({ x: box.left - frame.left, y: box.top - frame.top, width: box.width, height: box.height });
  const picture = svgElement("svg", { xmlns: SVG, width: frame.width, height: frame.height, viewBox: `0 0 ${frame.width} ${frame.height}` }), paper = getComputedStyle(document.body).backgroundColor;
  const hatch = drawnIn(drawnIn(picture, "defs", {}), "pattern", { id: "hatch", width: 7, height: 7, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  drawnIn(hatch, "rect", { width: 3, height: 7, fill: paper, opacity: 0.6 });
  drawnIn(picture, "rect", { width: "100%", height: "100%", fill: paper });
  const draw = (node) => {
    if (node.nodeType === Node.TEXT_NODE) return write(node);
    if (node.nodeType !== Node.ELEMENT_NODE || node.matches(".sr, button.quiet")) return;
    const style = getComputedStyle(node), box = node.getBoundingClientRect();
    if (style.display === "none" || style.visibility === "hidden") return;
    if (node.localName === "svg") {
      const copy = standalone(node);
      for (const [name, value] of Object.entries(at(box))) copy.setAttribute(name, value);
      picture.append(copy);
      return;
    }
    if (node.localName === "canvas") { if (hasSize(box)) drawnIn(picture, "image", { ...at(box), href: node.toDataURL() }); return; }
    if (hasSize(box) && !isClear(style.backgroundColor)) drawnIn(picture, "rect", { ...at(box), fill: style.backgroundColor, opacity: style.opacity });
    if (hasSize(box) && style.backgroundImage !== "none") drawnIn(picture, "rect", { ...at(box), fill: "url(#hatch)" });
    if (hasSize(box) && parseFloat(style.borderRightWidth)) drawnIn(picture, "rect", { x: box.right - frame.left - 1, y: box.top - frame.top, width: 1, height: box.height, fill: style.borderRightColor });
    node.childNodes.forEach(draw);
  };
  const write = (node) => {
    if (!node.data.trim()) return;
    const range = document.createRange();
    range.selectNodeContents(node);
    const box = range.getBoundingClientRect(), style = getComputedStyle(node.parentElement);
    if (!hasSize(box)) return;
    drawnIn(picture, "text", { x: box.left - frame.left, y: box.top - frame.top + 0.78 * box.height, fill: style.color, "font-size": style.fontSize, "font-weight": style.fontWeight, "font-family": style.fontFamily }, node.data.trim());
  };
  draw(target);
  return `<?xml version="1.0" encoding="UTF-8"?>\n${new XMLSerializer().serializeToString(picture)}`;
};
const dataUrl = (svg) => "data:image/svg+xml;charset=utf-8," + encodeURIComponent(svg);
/** Paint an SVG at twice its size. */
const pngOf = async (svg) => {
  const image = new Image();
  image.src = dataUrl(svg);
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [2 * image.width, 2 * image.height];
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
};
const savePicture = async (target, name, format) => {
  target = standIn(target);
  const chart = target.querySelector(".js-plotly-plot") || (target.matches(".js-plotly-plot") ? target : null);
  let svg;
  if (chart && chart.offsetParent !== null && !chart.closest(".by-allocation")) {
    const made = await window.Plotly.toImage(chart, { format: "svg", width: chart.clientWidth, height: chart.clientHeight });
    svg = decodeURIComponent(made.slice(made.indexOf(",") + 1));
  } else svg = svgOf(target);
  saveAs(`${name}.${format}`, format === "svg" ? new Blob([svg], { type: "image/svg+xml" }) : await pngOf(svg));
};
for (const [selector, name] of [["#summary .bar.big", "peak"], [".plot", "timeline"], ["#icicle .icicle", "icicle"], ["#difference #icicle-root", "difference"], [".rank-picture", "ranks"], [".growth", "needs"], ["#front-chart", "front"], ["[data-picture]", ""]])
  for (const target of all(selector)) {
    const tools = document.createElement("div"), kind = name || target.dataset.picture;
    tools.className = "table-tools";
    for (const format of ["svg", "png"]) {
      const button = pressable("quiet", () => savePicture(target, kind, format));
      button.textContent = "Save as " + format.toUpperCase();
      button.setAttribute("aria-label", `Save the picture (${kind}) as ${format.toUpperCase()}`);
      tools.append(button);
    }
    (target.closest(".split, figure") || target.parentElement.querySelector(":scope > .bar-axis") || target).after(tools);
  }
