// Lines of code that wait for the GPU: each with the lines around it, what it costs and what to write instead.

const SOURCES_SHOWN = 30;

registerView("sources", (section, element) => {
  if (section.note) element.append(h("p", { class: "muted" }, section.note));
  const cards = section.findings.map(sourcesCard), rest = cards.splice(SOURCES_SHOWN);
  element.append(...cards);
  if (rest.length) element.append(behind(`${rest.length} more`, h("div", {}, rest)));
  element.append(behind(`${section.title} as a table`, sourcesTable(section)));
});

function sourcesCard({ severity, place, call, cost, context, allowed, code, fix }) {
  return h("article", { class: `finding ${severity}` },
    h("h3", { class: "code" }, place),
    h("p", {}, h("span", { class: `severity ${severity}` }, severity), ` ${call}`),
    h("p", {}, cost),
    context ? h("p", { class: "muted" }, context) : null,
    allowed != null ? h("p", {}, h("span", { class: "muted" }, "Allowed: "), allowed) : null,
    code.length ? sourcesCode(code) : null,
    fix ? h("p", {}, h("span", { class: "muted" }, "Fix: "), fix.text) : null,
    fix?.before ? h("pre", {}, findingCode("-", fix.before), findingCode("+", fix.after)) : null);
}

/** The lines with their numbers; the one that waits is marked. */
function sourcesCode(code) {
  const digits = String(code.at(-1)[0]).length;
  return h("pre", { class: "source", tabindex: "0", "aria-label": "Source" }, code.map(([number, text, current]) =>
    h("div", { class: current ? "current" : null }, `${current ? ">" : " "} ${String(number).padStart(digits)} | ${text}`)));
}

function sourcesTable({ title, findings }) {
  const columns = [
    { title: "Place", kind: "text" }, { title: "Severity", kind: "text" }, { title: "Operation", kind: "text" }, { title: "Cause", kind: "text" },
    { title: "Calls", kind: "count" }, { title: "Steps with it", kind: "count" }, { title: "CPU waited", kind: "ns" }, { title: "GPU idle", kind: "ns" }, { title: "Copied", kind: "bytes" },
    { title: "Fix", kind: "text" },
  ];
  const rows = findings.map(({ place, severity, op, cause, count, steps, blocked_ns: blocked, idle_ns: idle, bytes, fix }) =>
    [place, severity, op, cause, count, steps, blocked, idle, bytes, fix?.text ?? ""]);
  return dataTable({ caption: title, columns, rows });
}
