// The step as one bar by class, with its figures and the evidence of the verdict.

registerView("overview", (section, element) => {
  if (section.parts.length) element.append(...overviewBar(section));
  element.append(
    h("dl", { class: "figures" }, section.figures.map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, value)))),
    ...section.notes.map((note) => h("p", { class: "muted" }, note)),
  );
});

function overviewBar({ parts, step_ns: whole, each }) {
  const label = ({ name, ns }) => `${name} ${format.ns(ns)} (${format.percent(ns / whole)})`;
  const bar = h("div", { class: "bar", role: "img", "aria-label": `The time ${each}: ${parts.map(label).join(", ")}` }, parts.map(overviewPart(whole)));
  const legend = h("ul", { class: "legend" }, parts.map((part) =>
    h("li", {}, h("span", { class: "swatch", style: { background: `var(--${part.class})` } }), label(part))));
  const columns = [
    { title: "Part", kind: "text" }, { title: `Time ${each}`, kind: "ns" }, { title: "Share", kind: "percent" }, { title: "What it is", kind: "text" },
  ];
  const rows = parts.map(({ name, ns, definition }) => [name, ns, ns / whole, definition]);
  return [bar, legend, behind("The parts as a table", dataTable({ caption: `The time ${each}, by part`, columns, rows }))];
}

function overviewPart(whole) {
  return ({ name, ns, class: kind, definition }) => h("div", {
    style: { flex: `${ns} 0 0`, background: `var(--${kind})` },
    onmousemove: (event) => tooltip.show(event.clientX, event.clientY, [[name, `${format.ns(ns)} (${format.percent(ns / whole)})`], definition]),
    onmouseleave: tooltip.hide,
  }, ns > 0.06 * whole ? name : "");
}
