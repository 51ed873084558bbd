// Everything that can be opened shows the same: how its category is known, and its whole stack to copy.
const make = (tag, className, text) => {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
};
/** The frames of an entry, the innermost first: those of C++ pale, the program's with their line of code. */
const stackLines = (frames, className) => {
  const pre = make("pre", className);
  pre.tabIndex = 0;
  frames.forEach(({ frame, native, code }, i) => {
    pre.append(make("span", native ? "native" : "", (i ? "\n" : "") + frame));
    if (code) pre.append(make("span", "code", "\n    " + code));
  });
  return pre;
};
/** A stack: the program's own lines (else all of Python's) first, the whole of it folded. */
const stackParts = ({ stack, native, library, code }) => {
  const frames = stack.map((frame, i) => ({ frame, native: native[i], library: library[i], code: code[i] }));
  const own = [frames.filter((f) => !f.native && !f.library), frames.filter((f) => !f.native)].find((some) => some.length) || frames;
  if (own.length === frames.length) return [stackLines(frames, "whole")];
  const rest = make("details", "rest"), hidden = frames.length - own.length;
  rest.append(make("summary", "", `With ${hidden} library and native ${hidden === 1 ? "frame" : "frames"}`), stackLines(frames, "whole"));
  return [stackLines(own, "own"), rest];
};
/** The place of the innermost line of an entry's stack that the page shows the source of; null where there is none. */
const sourceAnchor = ({ stack, native, library }) => {
  for (const [i, frame] of stack.entries()) {
    const [, file, number] = native[i] || library[i] ? [] : frame.match(/^(.*):(\d+)(?: |$)/) || [];
    const anchor = file && `source-${file.replace(/\s/g, "_")}-${number}`;
    if (anchor && $$(anchor)) return anchor;
  }
  return null;
};
const { opened: openedData = null } = await loaded;
/** The reference of what a row opens; undefined without. */
const referenceIn = (row) => row.querySelector("[data-open]")?.dataset.open;
const nativeFrames = new Set((openedData ? openedData.native : []).map((number) => openedData.frames[number]));
/** All frames of an entry, for the searches; "" without one. */
const framesOf = (reference) => {
  if (!reference || !openedData) return "";
  const [run, place] = reference.split(":").map(Number);
  return openedData.entries[run][place].stack.map((frame) => openedData.frames[frame]).join("\n");
};
const entryOf = async (reference) => {
  const [run, place] = reference.split(":").map(Number), opened = openedData, entry = opened.entries[run][place];
  const native = entry.stack.map((frame) => opened.native.includes(frame)), library = entry.stack.map((frame) => opened.library.includes(frame));
  const code = entry.stack.map((frame) => (opened.code || {})[frame] || "");
  return { ...entry, native, library, code, stack: entry.stack.map((frame) => opened.frames[frame]) };
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
    box.append(...stackParts(entry), copy);
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
    if (!details.open || !pre || pre.classList.contains("own") || details.dataset.unfolded) return;
    details.dataset.unfolded = "yes";
    const entry = await entryOf(details.dataset.open);
    if (!entry.stack.length) return;
    details.querySelector("details.rest")?.remove();
    pre.replaceWith(...stackParts(entry));
  });
