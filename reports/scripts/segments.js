// The map of segments: its other moments, and what lies under the pointer or is reached with the arrow keys.
const segmentMap = $$("segment-map");
/** Outline a block of so many bytes at an address, in the map shown; nothing without an address. */
let outlineBlock = () => false;
if (segmentMap) {
  const { segments: maps } = await loaded, about = $$("segment-about"), key = about.textContent;
  const LEFT = 8, WIDTH = 760, ROW = 34, TOP = 14, BAR = 16;
  let shown = maps.findIndex((map, i) => document.querySelector(`[data-map="${i}"]`)?.getAttribute("aria-pressed") === "true");
  let at = -1;
  if (shown < 0) shown = 0;
  const rectangle = (i) => maps[shown].rectangles.slice(5 * i, 5 * i + 5);
  const drawMap = () => {
    const map = maps[shown], svg = segmentMap.querySelector("svg"), perByte = WIDTH / map.scale, paths = [];
    for (let i = 0; i < map.rectangles.length; i += 5) {
      const [row, place, size, colour] = map.rectangles.slice(i, i + 4), wide = Math.max(size * perByte, 0.4), width = (wide > 4 ? wide - 0.7 : wide).toFixed(1);
      (paths[colour] ??= []).push(`M${(LEFT + place * perByte).toFixed(1)} ${row * ROW + TOP}h${width}v${BAR}h-${width}z`);
    }
    const parts = map.colours.map((name, i) => svgElement("path", { class: "block c-" + name, d: (paths[i] || []).join("") }));
    map.rows.forEach(([label, note, inside], i) => {
      parts.push(svgElement("text", { x: LEFT, y: i * ROW + 10 }, `${label} · ${note}`));
      for (const [from, bytes] of inside)
        if (bytes * perByte >= 4) parts.push(svgElement("rect", { class: "outline", x: LEFT + from * perByte, y: i * ROW + TOP, width: bytes * perByte, height: BAR }));
    });
    svg.setAttribute("viewBox", `0 0 ${2 * LEFT + WIDTH} ${ROW * map.rows.length + 4}`);
    svg.setAttribute("aria-label", "Map of segments. " + map.words);
    svg.replaceChildren(svg.querySelector("defs"), ...parts);
    $$("segment-words").textContent = map.words;
    all("[data-pools]").forEach((pools) => { pools.hidden = Number(pools.dataset.pools) !== shown; });
    all("[data-map]").forEach((button) => button.setAttribute("aria-pressed", String(Number(button.dataset.map) === shown)));
  };
  const mark = (row, place, size) => {
    segmentMap.querySelectorAll(".mark").forEach((old) => old.remove());
    const perByte = WIDTH / maps[shown].scale, width = Math.max(size * perByte, 3);
    segmentMap.querySelector("svg").append(svgElement("rect", { class: "mark", x: LEFT + place * perByte, y: row * ROW + TOP - 2, width, height: BAR + 4 }));
  };
  const hex = (address) => "0x" + address.toString(16);
  const tell = (i) => {
    at = i;
    if (i < 0) { about.textContent = key; segmentMap.querySelectorAll(".mark").forEach((old) => old.remove()); return; }
    const [row, place, size, colour, count] = rectangle(i), map = maps[shown];
    mark(row, place, size);
    const many = count > 1 ? `${count.toLocaleString("en-US")} neighbours, mostly ` : "";
    const [from, bytes, start] = map.rows[row][2].findLast(([begin]) => begin <= place);
    const segment = map.rows[row][2].length > 1 ? ` of the segment at ${hex(start)} with ${amountOf(bytes)}` : "";
    about.textContent = `${many}${map.labels[colour]}: ${amountOf(size)} at ${hex(start + place - from)}${segment}, in ${map.rows[row][0]}`;
  };
  const under = (event) => {
    const map = maps[shown], svg = segmentMap.querySelector("svg"), box = svg.getBoundingClientRect();
    const scale = svg.viewBox.baseVal.width / box.width, x = (event.clientX - box.left) * scale - LEFT, y = (event.clientY - box.top) * scale;
    const row = Math.floor(y / ROW), inside = y - row * ROW, place = (x * map.scale) / WIDTH;
    if (inside < TOP || inside > TOP + BAR) return -1;
    for (let i = 0; i < map.rectangles.length; i += 5)
      if (map.rectangles[i] === row && map.rectangles[i + 1] <= place && place < map.rectangles[i + 1] + map.rectangles[i + 2]) return i / 5;
    return -1;
  };
  const showMap = (i) => { shown = i; drawMap(); tell(-1); redrawMarks(); };
  let redrawMarks = () => {};
  outlineBlock = (address, size, moment) => {
    redrawMarks = () => {};
    if (address === null) { tell(-1); return false; }
    const row = maps[shown].rows.findIndex(([, , inside]) => inside.some(([, bytes, start]) => start <= address && address < start + bytes));
    if (row < 0) { tell(-1); return false; }
    const [place, , start] = maps[shown].rows[row][2].find(([, bytes, begin]) => begin <= address && address < begin + bytes);
    mark(row, place + address - start, size);
    about.textContent = moment;
    redrawMarks = () => outlineBlock(address, size, moment);
    return true;
  };
  segmentMap.tabIndex = 0;
  segmentMap.setAttribute("role", "application");
  segmentMap.setAttribute("aria-label", "Map of segments. Arrow keys move from block to block, Escape clears.");
  segmentMap.addEventListener("mousemove", (event) => { const i = under(event); if (i !== at) tell(i); });
  segmentMap.addEventListener("mouseleave", () => { tell(-1); redrawMarks(); });
  segmentMap.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const n = maps[shown].rectangles.length / 5, row = at < 0 ? -1 : rectangle(at)[0];
    const firstOf = (wanted) => { for (let i = 0; i < n; i++) if (rectangle(i)[0] === wanted) return i; return at; };
    const to = {
      ArrowRight: () => Math.min(at + 1, n - 1), ArrowLeft: () => Math.max(at - 1, 0), ArrowDown: () => firstOf(row + 1), ArrowUp: () => firstOf(row - 1),
      Home: () => 0, End: () => n - 1, Escape: () => -1,
    }[event.key];
    if (!to) return;
    event.preventDefault();
    tell(to());
  });
  for (const button of all("[data-map]")) button.addEventListener("click", () => showMap(Number(button.dataset.map)));
}
