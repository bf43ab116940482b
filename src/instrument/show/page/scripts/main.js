// Unpacks the data and draws the sections, one a frame, so that the first are there at once.

async function unpacked() {
  const text = document.getElementById("data").textContent;
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

function showKeys() {
  const dialog = document.getElementById("keys");
  dialog.querySelector("dl")?.remove();
  const list = keys
    .list()
    .map(([key, words]) => [h("dt", {}, h("kbd", {}, key === " " ? "Space" : key)), h("dd", {}, words)]);
  dialog.insertBefore(h("dl", {}, list), dialog.querySelector("form"));
  dialog.showModal();
}

async function start() {
  page.data = await unpacked();
  page.emit("data", page.data);
  const main = document.getElementById("content");
  const contents = document.getElementById("contents");
  keys.add("?", "List the keys", showKeys);
  keys.add("t", "Light or dark", theme.toggle);
  document.getElementById("help").addEventListener("click", showKeys);
  // Links inside the page must not replace the state in the hash.
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    main.focus();
  });
  const header = document.querySelector("header"); // its height depends on the number of sections
  new ResizeObserver(() =>
    document.documentElement.style.setProperty("--header", `${header.offsetHeight}px`)).observe(header);
  for (const section of page.data.sections) {
    const inner = h("div", { class: section.type });
    const heading = h("h2", { id: `${section.id}-title`, tabindex: "-1" }, section.title);
    const outer = h("section", { id: section.id, "aria-labelledby": `${section.id}-title` }, heading, inner);
    const go = (event) => {
      event.preventDefault();
      outer.scrollIntoView();
      heading.focus({ preventScroll: true });
    };
    contents.append(h("a", { href: `#${section.id}`, onclick: go }, section.title));
    main.append(outer);
    views.get(section.type)(section, inner);
    await new Promise((resolve) => {
      setTimeout(resolve);
    });
  }
  page.emit("ready");
  document.body.dataset.ready = "true";
}

await start();
