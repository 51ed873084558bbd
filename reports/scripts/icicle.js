/** Mark the boxes that a search finds, and sum them: of boxes within each other the outer one counts. */
const findBoxes = (words) => {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean), status = $$("icicle-found");
  if (!status) return;
  const wordsOf = (box) => (box.title + "\n" + framesOf(box.dataset.open)).toLowerCase();
  const found = new Set(all(".icicle:not([hidden]) .node:not(.d0) > .box").filter((box) => { const said = wanted.length ? wordsOf(box) : ""; return wanted.length && wanted.every((word) => said.includes(word)); }));
  for (const box of all(".icicle .box")) { box.classList.toggle("found", found.has(box)); box.classList.toggle("pale", found.size > 0 && !found.has(box)); }
  const outer = [...found].filter((box) => {
    for (let node = box.parentElement.parentElement.closest(".node"); node; node = node.parentElement.closest(".node"))
      if (found.has(node.querySelector(":scope > .box"))) return false;
    return true;
  });
  const sum = outer.reduce((bytes, box) => bytes + Number(box.dataset.bytes), 0);
  status.textContent = wanted.length ? `“${words.trim()}”: ${outer.length} ${outer.length === 1 ? "box" : "boxes"}, ${amountOf(sum)}` : "";
};
const brush = document.createElement("canvas").getContext("2d"), wholeLabels = new WeakMap();
/** Write into each box the longest label that fits; the shortest ends in an ellipsis where not even that does. */
const fitBoxes = (boxes) => {
  if (!boxes.length) return;
  const style = getComputedStyle(boxes[0]), plain = `${style.fontSize} ${style.fontFamily}`, widths = boxes.map((box) => box.clientWidth - 14);
  boxes.forEach((box, i) => {
    const label = box.querySelector(".label"), amount = box.querySelector("b");
    if (!wholeLabels.has(box)) wholeLabels.set(box, { size: amount.textContent, words: [label.textContent, ...(label.dataset.shorter || "").split("\n").filter(Boolean)] });
    const { size, words } = wholeLabels.get(box);
    brush.font = plain;
    label.textContent = words.find((word) => brush.measureText(word).width <= widths[i]) || words[words.length - 1];
    brush.font = "bold " + plain;
    amount.textContent = brush.measureText(size).width <= widths[i] ? size : "";
    box.setAttribute("aria-label", box.title);
  });
};
// The icicle: press to zoom, arrow keys to move, labels only where they fit.
const icicle = $$("icicle-root");
if (icicle) {
  const boxes = all(".box", icicle);
  const nodeOf = (box) => box.parentElement, boxOf = (node) => node.querySelector(":scope > .box");
  const seen = (node) => node.offsetParent !== null;
  const above = (node) => node.parentElement.closest(".node");
  const fit = () => fitBoxes(boxes);

  const zoomTo = (box) => {
    let chosen = nodeOf(box);
    // The box that fills the width already: go one level up.
    if (chosen.dataset.zoomed === "yes") chosen = above(chosen) || chosen;
    all(".node", icicle).forEach((node) => { node.classList.remove("off"); delete node.dataset.zoomed; });
    chosen.dataset.zoomed = "yes";
    for (let node = chosen; node.parentElement !== icicle; node = above(node))
      for (const sibling of node.parentElement.children) if (sibling !== node) sibling.classList.add("off");
    fit();
  };

  const rove = (box) => { boxes.forEach((b) => { b.tabIndex = b === box ? 0 : -1; }); };
  const move = (box, key) => {
    const node = nodeOf(box), depth = Array.from(node.classList).find((name) => /^d\d+$/.test(name));
    const row = all("." + depth, icicle).filter(seen), at = row.indexOf(node);
    const next = {
      ArrowLeft: () => row[at - 1], ArrowRight: () => row[at + 1], ArrowUp: () => above(node), Home: () => row[0], End: () => row[row.length - 1],
      ArrowDown: () => Array.from(node.querySelectorAll(":scope > .kids > .node")).find(seen),
    }[key];
    return next && next();
  };
  icicle.addEventListener("click", (event) => {
    const box = event.target.closest(".box");
    if (!box) return;
    rove(box);
    if (!box.dataset.open) zoomTo(box);
  });
  icicle.addEventListener("keydown", (event) => {
    const box = event.target.closest(".box"), node = box && move(box, event.key);
    if (!node || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    rove(boxOf(node));
    boxOf(node).focus();
  });
  icicle.addEventListener("focusin", (event) => { const box = event.target.closest(".box"); if (box) rove(box); });
  rove(boxes[0]);
  new ResizeObserver(fit).observe(icicle);
  watchers.push(fit);
}
