// The timeline by allocation: each of the largest is a band of its own, stacked by birth, drawn on a canvas.
const bandButton = document.querySelector('[data-choice="by"][data-value="allocation"]');
if (bandButton && bands) {
  const canvas = make("canvas"), tip = make("div"), pane = make("div"), words = make("p", "muted caption");
  canvas.id = "bands";
  canvas.setAttribute("aria-hidden", "true");
  tip.id = "band-tip";
  tip.hidden = true;
  pane.id = "selected";
  pane.hidden = true;
  words.id = "bands-words";
  plot.append(canvas, tip);
  $$("panel").prepend(pane);
  plot.append(words);

  /** One is picked: a band, and with it its kind (all of one reference). Or a kind alone, picked in a table or the icicle. */
  let picked = null, kind = null, dimmed = false, rectangles = [], hover = -1;
  const referenceOf = (i) => bands.groups[bands.group[i]][5];
  const shown = (i) => !state.hidden.has(bands.categoryOf(i));
  const many = (n, one) => `${n.toLocaleString("en-US")} ${one}${n === 1 ? "" : "s"}`;

  byAllocation.frame = () => ({ left: 46, top: 42, width: Math.max(canvas.clientWidth - 54, 50), height: Math.max(canvas.clientHeight - 42 - 40, 50) });
  /** Bytes below the bands at a point: the other allocations, summed. */
  const others = (p) => {
    let rest = total[p] * GIB;
    for (let i = 0; i < bands.n; i++) if (bands.alive(i, p) && shown(i)) rest -= bands.size[i];
    return Math.max(rest, 0);
  };
  /** The top of the axis in bytes; worked out once for each sum of what is shown. */
  let summed = null, highest = 0;
  const top = () => {
    if (summed !== total) { summed = total; highest = 0; for (let i = 0; i < nPoints; i++) if (total[i] > highest) highest = total[i]; }
    return (ceiling || Math.max(highest * 1.06, 1e-9)) * GIB;
  };
  const niceStep = (whole) => { const power = 10 ** Math.floor(Math.log10(whole / 5)); return [1, 2, 5, 10].map((m) => m * power).find((step) => step >= whole / 5); };

  /** The drawing without the selection, which changes more often. */
  const sheet = make("canvas");
  const outlinePicked = () => {
    [canvas.width, canvas.height] = [sheet.width, sheet.height];
    const brush = canvas.getContext("2d"), ratio = window.devicePixelRatio || 1, { top: above, height } = byAllocation.frame(), most = top();
    if (!sheet.width || !sheet.height) return;
    brush.drawImage(sheet, 0, 0);
    brush.setTransform(ratio, 0, 0, ratio, 0, 0);
    const Y = (bytes) => above + height - (bytes / most) * height;
    // Light around dark is seen on every category; a thin band's frame lies around it.
    for (const [paint, wide] of [["bg", 7], ["ink", 3]]) {
      brush.strokeStyle = ink(paint);
      brush.lineWidth = wide;
      for (const [i, x0, x1, , y0, y1] of rectangles)
        if (i >= 0 && i === picked) brush.strokeRect(x0 - 1, Y(y1) - 1, Math.max(x1 - x0, 1) + 2, Math.max(Y(y0) - Y(y1), 1) + 2);
    }
  };
  byAllocation.draw = () => {
    const ratio = window.devicePixelRatio || 1, wide = canvas.clientWidth, high = canvas.clientHeight;
    if (!wide || !high) return;
    sheet.width = Math.round(wide * ratio);
    sheet.height = Math.round(high * ratio);
    const brush = sheet.getContext("2d"), { left, top: above, width, height } = byAllocation.frame(), range = view || extent(), [low, far] = range;
    brush.setTransform(ratio, 0, 0, ratio, 0, 0);
    const font = getComputedStyle(document.body).fontFamily, most = top();
    const X = (x) => left + ((x - low) / (far - low)) * width, Y = (bytes) => above + height - (bytes / most) * height;
    const unit = most >= GIB ? GIB : 2 ** 20, step = niceStep(most / unit);
    brush.font = "11px " + font;
    brush.fillStyle = ink("soft");
    brush.textAlign = "right";
    for (let tick = 0; tick * step <= most / unit; tick++) {
      const y = Math.round(Y(tick * step * unit)) + 0.5;
      brush.fillStyle = ink("line");
      brush.fillRect(left, y, width, 1);
      brush.fillStyle = ink("soft");
      brush.fillText(String(Number((tick * step).toPrecision(6))), left - 6, y + 4);
    }
    brush.textAlign = "left";
    brush.fillText(unit === GIB ? "GiB" : "MiB", 2, above - 8);

    const [starts, points] = peakHold(range, Math.round(width)), colours = {};
    const colourOf = (name) => (colours[name] ??= colour(name));
    const open = new Map(), done = [];
    const close = (i) => { const run = open.get(i); if (run) { done.push(run); open.delete(i); } };
    const extend = (i, x0, x1, y0, y1) => {
      const run = open.get(i);
      if (run && run[4] === y0 && run[5] === y1 && run[2] === x0) { run[2] = x1; return; }
      close(i);
      open.set(i, [i, x0, x1, 0, y0, y1]);
    };
    // Bands are in the order of their birth, and the columns' points go forward: each band comes and goes once.
    let alive = [], next = 0;
    for (let c = 0; c < points.length - 1; c++) {
      const p = points[c], x0 = X(Math.max(starts[c], low)), x1 = X(starts[c + 1]);
      alive = alive.filter((i) => p < bands.death[i]);
      for (; next < bands.n && bands.birth[next] <= p; next++) if (p < bands.death[next] && shown(next)) alive.push(next);
      let sum = 0;
      for (const i of alive) sum += bands.size[i];
      let y = Math.max(total[p] * GIB - sum, 0);
      extend(-1, x0, x1, 0, y);
      for (const i of alive) { extend(i, x0, x1, y, y + bands.size[i]); y += bands.size[i]; }
    }
    for (const i of [...open.keys()]) close(i);
    rectangles = done;
    const paper = ink("bg"), grey = ink("hatch");
    for (const [i, x0, x1, , y0, y1] of done) {
      const yTop = Y(y1), tall = Y(y0) - yTop;
      brush.fillStyle = i < 0 ? grey : colourOf(bands.categoryOf(i));
      brush.globalAlpha = i < 0 ? 0.6 : !dimmed || referenceOf(i) === kind ? 1 : 0.38;
      // Without overlap, neighbours would show the paper between them.
      brush.fillRect(x0, yTop, x1 - x0 + 0.3, tall);
      if (i >= 0 && tall >= 4) { brush.globalAlpha = 0.4; brush.fillStyle = paper; brush.fillRect(x0, yTop, x1 - x0, 0.6); }
    }
    brush.globalAlpha = 1;
    const { shapes, annotations } = shapesAndLabels(range, width);
    const paperY = (y) => above + height * (1 - y);
    for (const { type, x0, x1, y0, y1, fillcolor } of shapes)
      if (type === "rect") { brush.fillStyle = fillcolor; brush.fillRect(X(x0), paperY(y1), Math.max(X(x1) - X(x0) - 0.6, 0.5), paperY(y0) - paperY(y1)); }
    brush.fillStyle = ink("soft");
    brush.textAlign = "center";
    for (const { x, y, text, yref, yanchor } of annotations)
      if (yref === "paper") brush.fillText(text, X(x), paperY(y) + (yanchor === "top" ? 22 : -3));
    const peak = highestPoint(), px = X(xs()[peak]);
    if (xs()[peak] >= low && xs()[peak] <= far) {
      const right = px > left + width / 2;
      brush.font = "bold 12px " + font;
      brush.textAlign = right ? "right" : "left";
      const label = amountOf(total[peak] * GIB) + (state.hidden.size ? " the most of these" : " peak"), y = Y(total[peak] * GIB) - 5, x = px + (right ? -5 : 5);
      brush.lineWidth = 4;
      brush.lineJoin = "round";
      brush.strokeStyle = paper;
      brush.strokeText(label, x, y);
      brush.fillStyle = ink("ink");
      brush.fillText(label, x, y);
    }
    if (axis !== "phase") {
      brush.font = "11px " + font;
      brush.fillStyle = ink("soft");
      brush.textAlign = "center";
      const stride = niceStep(far - low);
      for (let tick = Math.ceil(low / stride) * stride; tick <= far; tick += stride)
        brush.fillText(Number(tick.toPrecision(6)).toLocaleString("en-US") + (axis === "time" && timeline.timed ? " s" : ""), X(tick), above + height + 14);
    }
    words.textContent = bands.words + (state.hidden.size ? " (hidden categories left out)" : "") + ". Click a band, or press up and down, to select it; drag to zoom.";
    outlinePicked();
  };

  /** The band at a place of the page, -1 for the sum of the others, null outside. */
  const bandAt = (event) => {
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, { top: above, height } = byAllocation.frame();
    const bytes = ((above + height - (event.clientY - box.top)) / height) * top();
    for (const [i, x0, x1, , y0, y1] of rectangles) if (x0 <= x && x < x1 && y0 <= bytes && bytes < y1) return i;
    return null;
  };
  const isFreed = (i) => bands.died[i] >= 0;
  /** When a block was allocated or freed, as the panel writes it. */
  const when = (us) => seconds((us - timeline.clock_us) / timeline.unit);
  const lifetime = (i) => {
    const events = many(bands.end[i] - Math.max(bands.begin[i], 0), "event"), born = bands.begin[i] < 0 ? timeline.clock_us : bands.born[i];
    const last = timeline.axes.time[nPoints - 1] * timeline.unit + timeline.clock_us;
    const span = timeline.timed ? lasting((isFreed(i) ? bands.died[i] : last) - born) : events;
    return isFreed(i) ? (bands.begin[i] < 0 ? `alive for its first ${span}` : `alive for ${span}`)
      : bands.begin[i] < 0 ? "alive for the whole recording" : `alive for ${span}, to the end`;
  };
  const allocatedWords = (i) => (bands.begin[i] < 0 ? "before the recording" : `at ${when(bands.born[i])} in ${bands.groups[bands.group[i]][3] || "an unknown phase"}`);
  const freedWords = (i) => (isFreed(i) ? `freed at ${when(bands.died[i])} in ${bands.phases[bands.freed_in[i]] || "an unknown phase"}` : "not freed");
  const about = (i) => {
    const [name, category, shape, , , , inferred] = bands.groups[bands.group[i]];
    const label = timeline.labels[category] || category;
    return { category, words: [label + (inferred ? ", inferred" : ""), name === label ? "" : name, shape].filter(Boolean) };
  };
  const showTip = (event) => {
    const i = bandAt(event);
    if (i === null) { tip.hidden = true; return; }
    if (i !== hover || i < 0) {
      hover = i;
      if (i < 0) {
        const p = point, sums = new Map(stacked.filter(visible).map((trace) => [trace.meta, trace.y[p] * GIB]));
        for (let k = 0; k < bands.n; k++) if (bands.alive(k, p) && shown(k)) sums.set(bands.categoryOf(k), sums.get(bands.categoryOf(k)) - bands.size[k]);
        const parts = [...sums].filter(([, n]) => n >= 1).sort((a, b) => b[1] - a[1]);
        tip.replaceChildren(make("b", "", amountOf(others(p))), make("div", "", "the other allocations, summed"),
          ...parts.slice(0, 5).map(([name, n]) => make("div", "muted", `${timeline.labels[name] || name} ${amountOf(n)}`)));
      } else {
        tip.replaceChildren(make("b", "", amountOf(bands.size[i])), ...[...about(i).words, lifetime(i), freedWords(i)].map((text) => make("div", "", text)));
      }
    }
    const box = plot.getBoundingClientRect();
    tip.hidden = false;
    tip.style.left = Math.min(event.clientX - box.left + 14, plot.clientWidth - tip.offsetWidth - 4) + "px";
    tip.style.top = event.clientY - box.top + 14 + "px";
  };

  const clearMarks = () => all(".marked").forEach((element) => element.classList.remove("marked"));
  const markKind = () => {
    clearMarks();
    if (kind === null) return;
    for (const element of all(`.box[data-open="${kind}"]`)) element.classList.add("marked");
    for (const element of all(`details[data-open="${kind}"]`)) (element.closest("tr") || element).classList.add("marked");
    for (const element of all(`button[data-open="${kind}"]:not(.box)`)) (element.closest("tr, li") || element).classList.add("marked");
  };
  const sameLine = (i) => {
    const site = bands.groups[bands.group[i]][4], found = [];
    for (let k = 0; k < bands.n; k++) if (bands.alive(k, point) && bands.groups[bands.group[k]][4] === site) found.push(k);
    return [site, found];
  };
  const linkTo = (text, go) => { const button = pressable("plain-button link", go); button.textContent = text; return button; };
  const showPicked = async () => {
    pane.hidden = picked === null || by !== "allocation";
    $$("panel").classList.toggle("has-selection", !pane.hidden);
    if (pane.hidden) return;
    const i = picked, { category, words } = about(i), size = make("p", "panel-total"), reference = referenceOf(i);
    const what = make("p"), life = make("p", "muted"), clear = pressable("clear", () => pick(null));
    size.append(make("strong", "", amountOf(bands.size[i])));
    what.append(make("i", "swatch c-" + category), words.join(" · "));
    life.textContent = `Allocated ${allocatedWords(i)}, ${freedWords(i)}; ${lifetime(i)}.`;
    clear.textContent = "Clear";
    clear.setAttribute("aria-label", "Clear the selection");
    const parts = [make("h3", "", "Selected allocation"), size, what, life], entry = reference ? await entryOf(reference) : null;
    if (i !== picked) return;
    if (entry && entry.stack.length) parts.push(make("h3", "", "Allocated at"), ...stackParts(entry));
    const [site, found] = sameLine(i), links = make("p", "links");
    if (site && found.length > 1) {
      const sum = found.reduce((bytes, k) => bytes + bands.size[k], 0);
      parts.push(make("p", "", `Same line: ${many(found.length, "allocation")}, ${amountOf(sum)} alive here.`));
      if ($$("filter")) parts.push(linkTo("Show this line in the table", () => { listing.search(site.split(" ")[0]); $$("allocations").scrollIntoView(); }));
    }
    const box = all(`.box[data-open="${reference}"]`).find((element) => element.offsetParent), anchor = entry && sourceAnchor(entry);
    if (box) links.append(linkTo("In the icicle", () => { box.scrollIntoView({ block: "center" }); box.focus(); }));
    if (anchor) { const link = make("a", "", "In the source"); link.href = "#" + anchor; links.append(link); }
    if (segmentMap && outlineBlock(bands.address[i], bands.size[i], `${amountOf(bands.size[i])}, the selected allocation's place`))
      links.append(linkTo("In the segment map", () => { outlineBlock(bands.address[i], bands.size[i], `${amountOf(bands.size[i])}, the selected allocation's place`); segmentMap.scrollIntoView({ block: "center" }); segmentMap.focus(); }));
    if (reference) { const open = make("button", "plain-button link", "How its category is known"); open.type = "button"; open.dataset.open = reference; links.append(open); }
    pane.replaceChildren(...parts, links, clear);
  };
  const pick = (i, dim = false) => {
    picked = i;
    kind = i === null ? null : referenceOf(i);
    const whole = dimmed || dim;
    dimmed = dim && kind !== null;
    state.pick = i;
    writeAddress();
    if (i === null) outlineBlock(null);
    if (whole) byAllocation.draw(); else if (by === "allocation") outlinePicked();
    showPicked();
    markKind();
  };
  /** Mark a kind of allocation that was opened in a table or the icicle, and its band at the cursor. */
  const pickKind = (reference) => {
    if (picked !== null && referenceOf(picked) === reference) return;
    const same = [];
    for (let i = 0; i < bands.n; i++) if (referenceOf(i) === reference) same.push(i);
    const here = same.find((i) => bands.alive(i, point));
    if (same.length) pick(here ?? same[0], true);
  };
  const neighbour = (direction) => {
    const here = [];
    for (let i = 0; i < bands.n; i++) if (bands.alive(i, point) && shown(i)) here.push(i);
    if (!here.length) return;
    const at = here.indexOf(picked);
    pick(here[at < 0 ? (direction > 0 ? 0 : here.length - 1) : Math.min(Math.max(at + direction, 0), here.length - 1)]);
  };
  byAllocation.keys = {
    ArrowUp: () => neighbour(1), ArrowDown: () => neighbour(-1),
    Escape: () => { if (picked === null) return false; pick(null); return true; },
  };
  byAllocation.press = (event, fromX) => {
    const box = canvas.getBoundingClientRect(), { left, width } = byAllocation.frame(), [low, high] = view || extent();
    const place = (x) => low + (Math.min(Math.max((x - box.left - left) / width, 0), 1)) * (high - low);
    if (fromX !== null) { const ends = [place(fromX), place(event.clientX)].sort((a, b) => a - b); if (ends[1] > ends[0]) zoom(ends); return; }
    const i = bandAt(event), p = pointAt(event);
    if (p === null) return;
    held = true;
    go(p);
    pick(i !== null && i >= 0 ? (i === picked ? null : i) : null);
  };
  chart.addEventListener("mousemove", (event) => { if (by === "allocation") showTip(event); });
  chart.addEventListener("mouseleave", () => { tip.hidden = true; });
  chart.addEventListener("dblclick", () => { if (by === "allocation") zoom(null); });
  document.addEventListener("click", (event) => {
    const opened = event.target.closest("[data-open]");
    if (opened && opened.matches(".box, details")) pickKind(opened.dataset.open);
  });
  followers.push(() => {
    if (picked !== null && picked >= bands.n) { picked = kind = null; }
    markKind();
    if (by === "allocation" || !pane.hidden) showPicked();
  });
  const chooseBy = () => {
    by = state.by;
    plot.classList.toggle("by-allocation", by === "allocation");
    all('[data-choice="by"]').forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.value === by)));
    picked = state.pick !== null && state.pick < bands.n ? state.pick : null;
    kind = picked === null ? null : referenceOf(picked);
    draw();
    showPicked();
    markKind();
  };
  watchers.push(chooseBy);
  if (state.by === "allocation" || state.pick !== null) chooseBy();
}
