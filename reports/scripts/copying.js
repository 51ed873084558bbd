// Copy buttons. Pages are opened from disk and in frames, where the clipboard's own interface may be missing.
const copyText = async (text) => {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "sr";
    (document.querySelector("dialog[open]") || document.body).append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
};
const copyOnClick = (button, text) => {
  const words = button.textContent;
  button.addEventListener("click", async () => {
    const copied = await copyText(text());
    button.textContent = copied ? "Copied" : "Press Ctrl+C";
    setTimeout(() => { button.textContent = words; }, 1500);
  });
};
for (const button of all("button.copy")) copyOnClick(button, () => (button.parentElement.querySelector("pre.whole") || button.parentElement.querySelector("pre")).textContent);
