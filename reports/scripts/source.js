// A link to a line of the source opens its file.
const showLine = () => {
  const row = location.hash.startsWith("#source-") && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!row) return;
  for (let fold = row.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  for (const other of all("tr.pointed")) other.classList.remove("pointed");
  row.classList.add("pointed");
  row.scrollIntoView({ block: "center" });
};
window.addEventListener("hashchange", showLine);
showLine();
