// Lines of code that wait for the GPU: each with the lines around it, what it costs and what to write instead.

const SOURCES_SHOWN = 30;

registerView("sources", (section, element) => {
  if (section.note) element.append(h("p", { class: "muted" }, section.note));
  const cards = section.findings.map(sourcesCard);
  const rest = cards.splice(SOURCES_SHOWN);
  element.append(...cards);
  if (rest.length) element.append(behind(`${section.id}-rest`, `${rest.length} more`, h("div", {}, rest)));
  element.append(tableBehind(`${section.title} as a table`, sourcesTable(section)));
});

function sourcesCard({ severity, place, call, cost, context, allowed, code, fix }) {
  return h("article", { class: `finding ${severity}` },
    h("h3", { class: "code" }, place),
    h("p", {}, h("span", { class: `severity ${severity}` }, severity), ` ${call}`),
    h("p", {}, cost),
    context ? h("p", { class: "muted" }, context) : null,
    allowed != null ? labelled("Allowed", allowed) : null,
    code.length ? sourcesCode(code) : null,
    fix ? findingFix(fix) : null);
}

/** The lines with their numbers; the one that waits is marked. */
function sourcesCode(code) {
  const digits = String(code.at(-1)[0]).length;
  const line = ([number, text, current]) =>
    h("div", { class: current ? "current" : null },
      `${current ? ">" : " "} ${String(number).padStart(digits)} | ${text}`);
  return h("pre", { class: "source", tabindex: "0", "aria-label": "Source" }, code.map(line));
}

function sourcesTable({ id, title, findings }) {
  const columns = {
    Place: "text", Severity: "text", Operation: "text", Cause: "text", Calls: "count", "Steps with it": "count",
    "CPU waited": "ns", "GPU idle": "ns", Copied: "bytes", Fix: "text",
  };
  const rows = findings.map((found) => [
    found.place, found.severity, found.op, found.cause, found.count, found.steps,
    found.blocked_ns, found.idle_ns, found.bytes, found.fix?.text ?? "",
  ]);
  return { id, caption: title, columns: tableColumns(columns), rows };
}
