// Rows of the component table that open and close.
const rows = all("tr[data-path]");
const setOpen = (path, open) => {
  for (const row of rows.filter((r) => r.dataset.parent === path)) {
    row.hidden = !open;
    if (!open) setOpen(row.dataset.path, false);
  }
  const toggle = rows.find((r) => r.dataset.path === path).querySelector(".toggle");
  if (!toggle) return;
  toggle.textContent = open ? "▼" : "▶";
  toggle.setAttribute("aria-expanded", String(open));
};
for (const row of rows) {
  if (!rows.some((r) => r.dataset.parent === row.dataset.path)) continue;
  const toggle = document.createElement("button");
  toggle.type = "button";
  toggle.className = "toggle";
  const head = row.querySelector("th");
  toggle.setAttribute("aria-label", "Parts of " + head.textContent);
  toggle.addEventListener("click", () => setOpen(row.dataset.path, toggle.getAttribute("aria-expanded") !== "true"));
  head.prepend(toggle);
}
// Categories are worth seeing at once where they are few; their details open on demand.
for (const row of rows) if (row.querySelector(".toggle")) setOpen(row.dataset.path, row.dataset.path === "training");

