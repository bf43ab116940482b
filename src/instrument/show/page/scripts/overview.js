// What the step waits for and what the GPU does as bars by class, with figures and the evidence of the verdict.

const OVERVIEW_PALE = ["input", "overhead", "latency", "other"]; // classes whose color is pale in both themes

registerView("overview", (section, element) => {
  const figures = section.figures.map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, value)));
  for (const { id, title, parts } of section.bars) element.append(...overviewBar(id, title, parts, section));
  element.append(h("dl", { class: "figures" }, figures));
  element.append(...section.notes.map((note) => h("p", { class: "muted" }, note)));
});

function overviewBar(id, title, parts, { step_ns: whole, each }) {
  const label = ({ name, ns }) => `${name} ${format.ns(ns)} (${format.percent(ns / whole)})`;
  const words = `${title}, ${each}: ${parts.map(label).join(", ")}`;
  const columns = { Part: "text", [`Time ${each}`]: "ns", Share: "percent", "What it is": "text" };
  const rows = parts.map(({ name, ns, definition }) => [name, ns, ns / whole, definition]);
  const table = { id, caption: `${title}, ${each}`, columns: tableColumns(columns), rows };
  return [
    h("p", { class: "muted" }, title),
    h("div", { class: "bar", role: "img", "aria-label": words }, parts.map((part) => overviewPart(part, whole))),
    legend(parts.map((part) => [`var(--${part.class})`, label(part)])),
    tableBehind(`${title}, as a table`, table),
  ];
}

function overviewPart({ name, ns, class: kind, definition }, whole) {
  const color = OVERVIEW_PALE.includes(kind) ? "#000" : "var(--on-fill)";
  const lines = [[name, `${format.ns(ns)} (${format.percent(ns / whole)})`], definition];
  return h("div", {
    style: { flex: `${ns} 0 0`, background: `var(--${kind})`, color },
    onmousemove: (event) => tooltip.show(event.clientX, event.clientY, lines),
    onmouseleave: tooltip.hide,
  }, ns > 0.06 * whole ? name : "");
}
