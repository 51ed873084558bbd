// Tables sort by a heading, filter by category and size, copy as CSV and sum what they show.
const isShown = (row) => getComputedStyle(row).display !== "none";
const cellText = (cell) => (cell.querySelector("summary") || cell).textContent.replace(/\s+/g, " ").trim();
const bytesOf = (cell) => (cell.dataset.bytes === undefined ? null : Number(cell.dataset.bytes));
/** What a cell sorts by: its bytes, the number it begins with, else its words. */
const sortKey = (cell) => {
  const bytes = bytesOf(cell), words = cellText(cell);
  if (bytes !== null) return bytes;
  const number = /^[+−-]?[\d,]*\.?\d+/.exec(words.replace(/^[^\w+−.-]+/, ""));
  return cell.classList.contains("num") ? (number ? Number(number[0].replaceAll(",", "").replace("−", "-")) : -Infinity) : words.toLowerCase();
};
const sortTable = (table, place, direction) => {
  const body = table.tBodies[0], lines = [...body.rows];
  lines.forEach((row, i) => { row.dataset.first ??= i; });
  lines.sort((a, b) => {
    const [left, right] = [a, b].map((row) => sortKey(row.cells[place]));
    return (direction && (left < right ? -direction : left > right ? direction : 0)) || a.dataset.first - b.dataset.first;
  });
  body.append(...lines);
  [...table.tHead.rows[0].cells].forEach((cell, i) => {
    if (i === place && direction) cell.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending"); else cell.removeAttribute("aria-sort");
  });
  table.dispatchEvent(new Event("sorted"));
};
const makeSortable = (table) => {
  [...table.tHead.rows[0].cells].forEach((head, place) => {
    if (!head.textContent.trim() || [...table.tBodies[0].rows].every((row) => !cellText(row.cells[place]))) return;
    const numeric = head.classList.contains("num");
    const button = document.createElement("button");
    button.type = "button";
    button.className = "sort";
    button.title = "Sort by this; again to reverse, a third time for the first order";
    button.addEventListener("click", () => {
      const first = numeric ? -1 : 1, now = { ascending: 1, descending: -1 }[head.getAttribute("aria-sort")] || 0;
      sortTable(table, place, now === 0 ? first : now === first ? -first : 0);
    });
    button.append(...head.childNodes);
    head.append(button);
  });
};

// A spreadsheet would run text that begins like a formula.
const csvCell = (words) => {
  const safe = /^[=+@\t-]/.test(words) && Number.isNaN(Number(words)) ? "'" + words : words;
  return /[",\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
};
/** What is shown in the place of the peak's own icicle and table while the cursor is elsewhere (moments.js). */
const standIns = new Map();
const standIn = (element) => standIns.get(element) || element;
/** The rows that a filter finds, also those that the table does not show yet; without a filter all that are shown. */
const foundRows = (table) => (table.matches(".allocations") ? listing.found.filter((row) => table.contains(row)) : [...table.tBodies[0].rows].filter(isShown));
/** A row's stack as two cells: Python's frames, the innermost first, and the native ones. */
const stackCells = (row) => {
  const reference = referenceIn(row), pre = row.querySelector("pre.whole") || row.querySelector("pre");
  const frames = (reference ? framesOf(reference) : pre ? pre.textContent : "").split("\n");
  const marked = new Set(pre ? [...pre.querySelectorAll(".native")].map((frame) => frame.textContent) : []);
  const isNative = (frame) => (reference ? nativeFrames : marked).has(frame);
  return [frames.filter((frame) => !isNative(frame)), frames.filter(isNative)].map((some) => some.filter(Boolean).join(" < "));
};
/** Rows as CSV, bytes exact, without columns that have bars only; the last columns are the stack. */
const csvOf = (table) => {
  const heads = [...table.tHead.rows[0].cells], lines = foundRows(table);
  const places = heads.map((_, i) => i).filter((i) => lines.some((row) => row.cells[i] && cellText(row.cells[i])));
  const inBytes = (i) => lines.some((row) => bytesOf(row.cells[i]) !== null);
  const stacks = lines.map(stackCells), stacked = [0, 1].filter((i) => stacks.some((cells) => cells[i]));
  const written = [[...places.map((i) => (cellText(heads[i]) || "Name") + (inBytes(i) ? " (bytes)" : "")), ...stacked.map((i) => ["Stack", "Native frames"][i])]];
  lines.forEach((row, n) => written.push([
    ...places.map((i) => (bytesOf(row.cells[i]) === null ? cellText(row.cells[i]).replace(/^[▶▼] ?/, "") : String(bytesOf(row.cells[i])))),
    ...stacked.map((i) => stacks[n][i]),
  ]));
  return written.map((cells) => cells.map(csvCell).join(",")).join("\r\n") + "\r\n";
};
/** The sum of each column that can be summed, over the rows shown. */
const sumsOf = (table) => {
  const lines = [...table.tBodies[0].rows].filter(isShown);
  const sums = [...table.tHead.rows[0].cells].flatMap((head, i) => ("sums" in head.dataset ? [lines.reduce((sum, row) => sum + (bytesOf(row.cells[i]) || 0), 0)] : []));
  return sums.length ? `${lines.length} ${lines.length === 1 ? "row" : "rows"} shown, ${sums.map(amountOf).join(" and ")}` : "";
};
for (const table of all("main table")) {
  if (!table.tHead || table.tBodies[0].rows.length < 2) continue;
  const nested = table.querySelector("tr[data-path]") || "fixed" in table.dataset, below = table.closest(".scroll") || table;
  if (!nested) makeSortable(table);
  const tools = document.createElement("div"), sum = document.createElement("span"), copy = document.createElement("button");
  tools.className = "table-tools";
  sum.className = "muted sum";
  copy.type = "button";
  copy.className = "quiet";
  copy.textContent = "Copy as CSV";
  copy.title = table.matches(".allocations") ? "Copies all rows that match the filters, sizes in bytes" : "Copies the rows that the table shows, sizes in bytes";
  copyOnClick(copy, () => csvOf(standIn(table)));
  tools.append(sum, copy);
  below.after(tools);
  const show = () => { sum.textContent = sumsOf(standIn(table)); };
  if (table.querySelector("th[data-sums]")) {
    new MutationObserver(show).observe(table.tBodies[0], { attributes: true, subtree: true, attributeFilter: ["hidden"] });
    watchers.push(show);
    table.addEventListener("replaced", show);
    show();
  }
}

// The allocations' filters: one category is the one that the legend isolates, too.
const onlyCategory = $$("only-category"), leastBytes = $$("least-bytes");
if (onlyCategory) {
  onlyCategory.addEventListener("change", () => setHidden(onlyCategory.value ? categories.filter((c) => c !== onlyCategory.value) : []));
  leastBytes.addEventListener("change", () => { state.least = Number(leastBytes.value); writeAddress(); watchers.forEach((watch) => watch()); });
  const restore = () => {
    onlyCategory.value = (state.hidden.size && isolated()) || "";
    leastBytes.value = String(state.least);
    if (onlyCategory.selectedIndex < 0) onlyCategory.value = "";
    if (leastBytes.selectedIndex < 0) { state.least = 0; leastBytes.value = "0"; }
  };
  watchers.push(restore);
  restore();
}
