// Everything that can be opened shows the same: how its category is known, and its whole stack to copy.
const make = (tag, className, text) => {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
};
/** The frames of an entry, those of C++ pale. */
const stackLines = ({ stack, native, code }) => {
  const pre = make("pre", "whole");
  pre.tabIndex = 0;
  stack.forEach((frame, i) => {
    pre.append(make("span", native[i] ? "native" : "", (i ? "\n" : "") + frame));
    if (code[i]) pre.append(make("span", "code", "\n    " + code[i]));
  });
  return pre;
};
const entryOf = async (reference) => {
  const [run, place] = reference.split(":").map(Number), { opened } = await loaded, entry = opened.entries[run][place];
  const native = entry.stack.map((frame) => opened.native.includes(frame));
  const code = entry.stack.map((frame) => (opened.code || {})[frame] || "");
  return { ...entry, native, code, stack: entry.stack.map((frame) => opened.frames[frame]) };
};

const dialog = make("dialog");
dialog.id = "opened";
dialog.setAttribute("aria-labelledby", "opened-title");
document.body.append(dialog);
dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
const openEntry = async (reference) => {
  const entry = await entryOf(reference), title = make("h2", "", entry.what), close = pressable("close", () => dialog.close());
  title.id = "opened-title";
  close.textContent = "Close";
  const parts = [title];
  if (entry.label) {
    const category = make("p");
    category.append(make("i", "swatch c-" + entry.colour), entry.label + (entry.size ? " · " + entry.size : ""));
    parts.push(category);
  }
  for (const words of entry.about) parts.push(make("p", "muted", words));
  if (entry.stack.length) {
    const copy = make("button", "copy", "Copy"), box = make("div", "copyable");
    copy.type = "button";
    copyOnClick(copy, () => entry.stack.join("\n"));
    box.append(stackLines(entry), copy);
    parts.push(box);
  } else parts.push(make("p", "muted", "No stack was recorded for it."));
  dialog.replaceChildren(...parts, close);
  dialog.showModal();
};
document.addEventListener("click", (event) => {
  const opener = event.target.closest("button[data-open]");
  if (opener) openEntry(opener.dataset.open);
});
// Lines of tables unfold in place; what they unfold to is the same.
for (const details of all("details[data-open]"))
  details.addEventListener("toggle", async () => {
    const pre = details.querySelector("pre");
    if (!details.open || !pre || pre.classList.contains("whole")) return;
    const entry = await entryOf(details.dataset.open);
    if (entry.stack.length) pre.replaceWith(stackLines(entry));
  });
