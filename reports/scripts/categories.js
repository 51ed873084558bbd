// The legend shows one category alone, or hides some: in chart, panel, tables, bars and icicle together.
const hiddenStyle = document.createElement("style");
document.head.append(hiddenStyle);
const showing = document.createElement("div");
showing.id = "showing";
showing.setAttribute("role", "status");
document.body.append(showing);

const categoryLabels = new Map();
const isolated = () => { const shown = categories.filter((c) => !state.hidden.has(c)); return shown.length === 1 ? shown[0] : null; };
const setHidden = (hidden) => { state.hidden = new Set(hidden); writeAddress(); watchers.forEach((watch) => watch()); };
const isolate = (category) => setHidden(isolated() === category ? [] : categories.filter((c) => c !== category));
const toggleCategory = (category) => {
  const hidden = new Set(state.hidden);
  if (!hidden.delete(category)) hidden.add(category);
  setHidden(hidden.size === categories.length ? [] : hidden);
};
const pressable = (className, onClick) => {
  const button = document.createElement("button");
  button.type = "button";
  button.className = className;
  button.addEventListener("click", onClick);
  return button;
};

for (const item of legends) {
  const category = item.dataset.category, only = pressable("only", () => isolate(category));
  only.append(...item.childNodes);
  const label = Array.from(only.childNodes).find((node) => node.nodeType === Node.TEXT_NODE);
  categoryLabels.set(category, label.textContent.trim());
  only.title = "Show only this; again for all";
  item.append(only, pressable("hide", () => toggleCategory(category)));
}

const showCategories = () => {
  const one = isolated(), names = [...state.hidden].map((c) => categoryLabels.get(c) || c);
  hiddenStyle.textContent = [...state.hidden].map((c) => {
    const name = CSS.escape(c);
    return `.seg.c-${name} { opacity: .12; } tr[data-category="${name}"], .node[data-category="${name}"] { display: none; }`;
  }).join("\n");
  for (const row of all("tr[data-categories]"))
    row.classList.toggle("away", row.dataset.categories.split(" ").every((c) => state.hidden.has(c)));
  for (const item of legends) {
    const category = item.dataset.category, hidden = state.hidden.has(category), hide = item.querySelector(".hide");
    item.classList.toggle("away", hidden);
    item.querySelector(".only").setAttribute("aria-pressed", String(one === category));
    hide.textContent = hidden ? "+" : "×";
    hide.setAttribute("aria-label", (hidden ? "Show " : "Hide ") + (categoryLabels.get(category) || category));
  }
  showing.hidden = !state.hidden.size;
  const words = document.createElement("span");
  words.textContent = one ? "Only " + (categoryLabels.get(one) || one) : "Without " + names.join(", ");
  showing.replaceChildren(words, pressable("", () => setHidden([])));
  showing.lastChild.textContent = "Show all";
};
watchers.push(showCategories);
showCategories();
