// The list of contents marks the section that is read, and copies a link to what the page shows.
const contents = $$("contents");
if (contents) {
  const links = all("a[href^='#']", contents).map((link) => [link, document.getElementById(link.hash.slice(1))]).filter(([, section]) => section);
  let now = null;
  const mark = () => {
    const top = Math.max(contents.getBoundingClientRect().bottom, 0) + 40;
    const atEnd = window.innerHeight + window.scrollY >= root.scrollHeight - 2 && window.scrollY > 0;
    const passed = links.filter(([, section]) => section.getBoundingClientRect().top <= top);
    [now = null] = (atEnd ? links : passed.length ? passed : links.slice(0, 1)).at(-1) || [];
    for (const [link] of links) if (link === now) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current");
  };
  let waiting = false;
  window.addEventListener("scroll", () => {
    if (!waiting) requestAnimationFrame(() => { waiting = false; mark(); });
    waiting = true;
  }, { passive: true });
  mark();
  // A link of the page's own leaves what the reader chose in the address.
  for (const [link, section] of links)
    link.addEventListener("click", (event) => {
      event.preventDefault();
      section.scrollIntoView();
      const heading = section.querySelector("h2") || section;
      heading.tabIndex = -1;
      heading.focus({ preventScroll: true });
    });
  const here = () => addressWords(window.scrollY > 0 && now ? now.hash.slice(1) : "");
  copyOnClick($$("copy-link"), () => location.href.split("#")[0] + (here() ? "#" + here() : ""));
}
