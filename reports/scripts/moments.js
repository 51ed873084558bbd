// The icicle and the table follow the cursor. At the peak they are the page's own; elsewhere they are made of the
// allocations that are drawn one by one, and the sums of the others.
{
  const SMALLEST = 250;
  const host = (own, className) => {
    if (!own) return null;
    const note = make("p", "moment-note"), place = make("div", className);
    note.setAttribute("role", "status");
    note.hidden = place.hidden = true;
    own.before(note, place);
    return { own, note, place };
  };
  const icicle = bands ? host($$("icicle-root"), "icicle") : null, table = bands ? host($$("allocation-table")?.closest(".scroll"), "moment-table") : null;
  /** Alike allocations alive at a point, the largest sum first: [band's group, number, bytes]. */
  const aliveAt = (p) => {
    const sums = new Map();
    for (let i = 0; i < bands.n; i++) {
      if (!bands.alive(i, p)) continue;
      const one = sums.get(bands.group[i]) || [bands.groups[bands.group[i]], 0, 0];
      one[1]++;
      one[2] += bands.size[i];
      sums.set(bands.group[i], one);
    }
    return [...sums.values()].sort((a, b) => b[2] - a[2]);
  };
  const node = (label, category, bytes, whole, above, depth, kids, reference, inferred) => {
    const element = make("div", "node d" + depth), box = make("button", category ? "box c-" + category : "box root");
    element.style.flex = `${(100 * bytes) / (above || 1)} 1 0`;
    if (depth === 1) element.dataset.category = category;
    box.type = "button";
    box.title = `${label}, ${amountOf(bytes)}, ${((100 * bytes) / (whole || 1)).toFixed(1)}% of this moment${inferred ? ", inferred" : ""}`;
    box.dataset.bytes = bytes;
    if (reference) box.dataset.open = reference;
    if (inferred) box.classList.add("guess");
    box.append(make("span", "label", label), make("b", "", amountOf(bytes)));
    element.append(box);
    if (kids.length) { const below = make("div", "kids"); below.append(...kids); element.append(below); }
    return element;
  };
  const nodes = (list, whole, above, depth, category) => {
    const drawn = list.filter(([, bytes]) => bytes * SMALLEST >= whole), small = list.filter(([, bytes]) => bytes * SMALLEST < whole).reduce((sum, [, bytes]) => sum + bytes, 0);
    return [...drawn.map(([make_, bytes]) => make_(bytes, above, depth)), ...(small >= 1 ? [node("smaller ones", category, small, whole, above, depth, [])] : [])];
  };
  const drawIcicle = (alive, whole) => {
    const parts = stacked.map((trace) => [trace.meta, trace.y[point] * GIB]).filter(([, n]) => n >= 1).sort((a, b) => b[1] - a[1]);
    const kids = parts.map(([category, n]) => {
      const sites = new Map(), known = alive.filter(([[, its]]) => its === category);
      for (const entry of known) { const site = entry[0][4] || "no line of the program"; sites.set(site, [...(sites.get(site) || []), entry]); }
      const rest = n - known.reduce((sum, [, , bytes]) => sum + bytes, 0);
      const below = [...sites].map(([site, entries]) => [site, entries, entries.reduce((sum, [, , bytes]) => sum + bytes, 0)]).sort((a, b) => b[2] - a[2])
        .map(([site, entries, bytes]) => [(sum, above, depth) => node(site, category, sum, whole, above, depth,
          nodes(entries.map(([[name, , shape, , , opens, inferred], count, size]) => [(of, over, level) => node((name || shape) + (count > 1 ? ` ×${count}` : ""), category, of, whole, over, level, [], opens, inferred), size]), whole, sum, depth + 1, category)), bytes]);
      if (rest >= 1) below.push([(sum, above, depth) => node("the others, summed", category, sum, whole, above, depth, []), rest]);
      return node(timeline.labels[category] || category, category, n, whole, whole, 1, nodes(below, whole, n, 2, category));
    });
    icicle.place.replaceChildren(node("This moment", "", whole, whole, whole, 0, kids));
    fitBoxes(all(".box", icicle.place));
  };
  const drawTable = (alive) => {
    const element = make("table", "allocations"), head = make("tr"), body = make("tbody"), thead = make("thead");
    for (const [title, right] of [["Allocation"], ["Category"], ["Size", true], ["Allocated in"]]) { const cell = make("th", right ? "num" : "", title); cell.scope = "col"; if (right) cell.dataset.sums = ""; head.append(cell); }
    for (const [[name, category, shape, phase, site, opens, inferred], count, bytes] of alive) {
      const row = make("tr"), what = make("td"), label = make("td"), button = make("button", "plain-button", name + (count > 1 ? ` ×${count}` : ""));
      button.type = "button";
      if (opens) button.dataset.open = opens;
      row.dataset.category = category;
      row.dataset.bytes = bytes;
      row.dataset.each = bytes / count;
      what.append(button, ...(inferred ? [make("span", "badge guess", "inferred")] : []), make("small", "muted", [shape, site].filter(Boolean).join(" · ")));
      label.append(make("i", "swatch c-" + category), timeline.labels[category] || category);
      const size = make("td", "num", amountOf(bytes));
      size.dataset.bytes = bytes;
      row.append(what, label, size, make("td", "", phase));
      body.append(row);
    }
    thead.append(head);
    element.append(thead, body);
    const scroll = make("div", "scroll");
    scroll.tabIndex = 0;
    scroll.append(element);
    table.place.replaceChildren(scroll);
    makeSortable(element);
    element.addEventListener("sorted", () => listing.refresh());
    standIns.set($$("allocation-table"), element);
  };
  const showMoment = () => {
    const elsewhere = Boolean(bands) && point !== timeline.peak_point;
    for (const part of [icicle, table]) {
      if (!part) continue;
      part.own.hidden = elsewhere;
      part.note.hidden = part.place.hidden = !elsewhere;
    }
    if (icicle) standIns.set(icicle.own, elsewhere ? icicle.place : icicle.own);
    if (table) headings.forEach(([text, words, note]) => { text.data = elsewhere ? `Allocations alive at ${$$("panel-where").textContent}` : words; if (note) note.hidden = elsewhere; });
    if (!elsewhere) {
      standIns.delete($$("allocation-table"));
      listing.rows = null;
      listing.refresh();
      return;
    }
    const alive = aliveAt(point), whole = stacked.reduce((sum, trace) => sum + trace.y[point], 0) * GIB, known = alive.reduce((sum, [, , bytes]) => sum + bytes, 0);
    const n = alive.reduce((sum, [, count]) => sum + count, 0), many = n === 1 ? "1 individual allocation" : `${n.toLocaleString("en-US")} individual allocations`;
    const words = `At ${$$("panel-where").textContent}: ${amountOf(known)} of ${amountOf(whole)} from ${many}; the others are summed by category.`;
    for (const part of [icicle, table]) {
      if (!part) continue;
      const back = pressable("plain-button link", () => { held = false; go(timeline.peak_point); });
      back.textContent = "Back to the peak";
      part.note.replaceChildren(words + " ", back);
    }
    if (icicle) drawIcicle(alive, whole);
    if (table) drawTable(alive);
    listing.rows = all(".moment-table tbody tr");
    listing.refresh();
  };
  let waiting = null;
  /** The table's heading names the moment: [text, words at the peak, note about the peak's rows]. */
  const headings = all("#allocations > h2").map((heading) => [heading.firstChild, heading.firstChild.data, heading.querySelector("small")]);
  // Only where the cursor rests: the lists are long.
  if (prepared.length === 1 && point !== timeline.peak_point) showMoment();
  if (prepared.length === 1) followers.push(() => { clearTimeout(waiting); waiting = setTimeout(showMoment, 120); });
}
