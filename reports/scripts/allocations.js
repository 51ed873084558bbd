// The allocations' filter. Away from the peak, moments.js lists other rows, and the filter is about these.
const listing = { rows: null, found: [], search: () => {}, refresh: () => {} };
const filter = $$("filter");
if (filter) {
  const described = (rows) => rows.map((row) => [row, (row.textContent + " " + framesOf(referenceIn(row))).toLowerCase(), row.dataset.category]);
  const atPeak = described(all("#allocation-table tbody tr"));
  let lines = atPeak;
  const more = $$("more"), nothing = $$("nothing");
  let shown = 20;
  const show = () => {
    const wanted = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    // The table may be sorted.
    lines.sort(([a], [b]) => a.rowIndex - b.rowIndex);
    const found = lines.filter(([row, text, category]) => !state.hidden.has(category) && Number(row.dataset.each) >= state.least && wanted.every((word) => text.includes(word)));
    listing.found = found.map(([row]) => row);
    const visible = new Set((wanted.length ? found : found.slice(0, shown)).map(([row]) => row));
    for (const [row] of lines) row.hidden = !visible.has(row);
    $$("allocation-table").dispatchEvent(new Event("replaced"));
    more.hidden = wanted.length > 0 || shown >= found.length;
    more.textContent = "Show all " + found.length + " lines";
    const least = state.least ? `allocations of ${amountOf(state.least)} or more each` : "";
    const where = (least && wanted.length ? " in " + least : "") + (state.hidden.size ? " among the categories shown" : "");
    const sum = found.reduce((bytes, [row]) => bytes + Number(row.dataset.bytes), 0);
    const lineCount = `${found.length} ${found.length === 1 ? "line" : "lines"}, ${amountOf(sum)}`;
    const what = wanted.length ? `“${filter.value.trim()}”` : least.replace("a", "A");
    nothing.textContent = found.length ? (what ? `${what}${where}: ${lineCount}` : "")
      : wanted.length ? `No allocation${where} matches ${what}.` : least ? `No ${least}${where}.` : `No listed allocation${where}.`;
  };
  const searchAll = () => { show(); findBoxes(filter.value); };
  const search = (words) => { filter.value = state.filter = words; writeAddress(); searchAll(); };
  filter.addEventListener("input", () => { state.filter = filter.value.trim(); writeAddress(); searchAll(); });
  more.addEventListener("click", () => { shown = lines.length; show(); });
  filter.addEventListener("keydown", (event) => { if (event.key === "Escape") search(""); });
  for (const link of all("[data-filter]")) link.addEventListener("click", () => search(link.dataset.filter));
  const restore = () => { if (filter.value.trim() !== state.filter) filter.value = state.filter; searchAll(); };
  watchers.push(restore);
  $$("allocation-table").addEventListener("sorted", show);
  restore();
  listing.search = search;
  listing.refresh = () => { lines = listing.rows ? described(listing.rows) : atPeak; searchAll(); };
}
