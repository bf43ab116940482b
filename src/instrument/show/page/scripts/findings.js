// The findings: what each would win, its evidence and fix, and the way to its place in the timeline.

registerView("findings", ({ findings, nothing, abstained }, element) => {
  const most = Math.max(...findings.map(({ win_ns: ns }) => ns ?? 0), 1);
  const cards = findings.map((found, index) => findingCard(found, `finding-${index + 1}`, index + 1, most));
  const [shown, rest] = [true, false].map((worth) => cards.filter((_, index) => findings[index].worth === worth));
  element.append(...(shown.length ? shown : [h("p", {}, nothing)]));
  const small = `${rest.length} worth less than 1 %`;
  if (rest.length) element.append(behind("small-findings", small, h("div", {}, rest)));
  if (findings.length) element.append(tableBehind("The findings as a table", findingsTable(findings)));
  if (abstained.length) {
    const rules = abstained.length === 1 ? "rule" : "rules";
    const columns = tableColumns({ Rule: "text", "What is missing": "text" });
    const table = { id: "abstained", caption: "Rules that lack evidence", columns, rows: abstained };
    element.append(tableBehind(`${abstained.length} ${rules} abstained for lack of evidence`, table));
  }
  findingsKeys(cards);
});

function findingsTable(findings) {
  const columns = { Finding: "text", "Replayed win": "ns", "At most": "ns", Rule: "text", Place: "text" };
  const rows = findings.map((found) => [found.title, found.replayed_ns, found.win_ns, found.rule, found.place]);
  return { id: "all-findings", caption: "Findings", columns: tableColumns(columns), rows };
}

function findingCard(found, id, number, most) {
  return h("article", { class: `finding ${found.severity}`, tabindex: "-1" },
    h("h3", {}, `${number}. ${found.title}`),
    labelled("To win", found.win_text),
    found.win_ns ? findingWin(found, most) : null,
    found.place ? labelled("At", h("span", { class: "code" }, found.place)) : null,
    found.fix ? findingFix(found.fix) : null,
    disclosure(id, "Evidence", findingEvidence(found)),
    found.span ? findingActions(found, id) : null);
}

function findingWin({ win_ns: win, replayed_ns: replayed }, most) {
  const width = (ns) => `${(100 * ns) / most}%`;
  return h("div", { class: "win", "aria-hidden": "true" },
    h("div", { class: "most", style: { width: width(win) } }),
    replayed ? h("div", { class: "replayed", style: { width: width(replayed) } }) : null);
}

function findingFix({ text, before, after }) {
  const lines = (kind, sign, code) =>
    code.split("\n").filter(Boolean).map((line) => h("div", { class: kind }, `${sign} ${line}`));
  const code = before ? h("pre", {}, lines("minus", "-", before), lines("plus", "+", after)) : null;
  return [labelled("Fix", text), code];
}

function findingEvidence({ meaning, evidence, severity, confidence, rule }) {
  return h("div", {},
    h("p", {}, `${meaning} Severity ${severity}, confidence ${confidence}, rule ${rule}.`),
    h("ul", {}, evidence.map(([definition, value]) => h("li", {}, `${definition}: `, h("b", {}, value)))));
}

function findingActions({ title, span: [start, end] }, id) {
  places.set(id, { start_ns: start, end_ns: end, label: title });
  const button = (text, onclick) => h("button", { type: "button", onclick }, text);
  const perfetto = () => page.emit("perfetto", { start_ns: start, end_ns: end });
  return h("div", { class: "actions" },
    findingsHaveTimeline() ? button("Show in the timeline", () => page.emit("show", id)) : null,
    page.data.serve.perfetto ? button("Show in Perfetto", perfetto) : null);
}

const findingsHaveTimeline = () => page.data.sections.some(({ type }) => type === "timeline");

function findingsKeys(cards) {
  let at = -1;
  const go = (by) => () => {
    at = Math.max(0, Math.min(cards.length - 1, at + by));
    cards[at]?.focus();
    cards[at]?.scrollIntoView({ block: "nearest" });
  };
  keys.add("j", "Next finding", go(1));
  keys.add("k", "Previous finding", go(-1));
  if (!findingsHaveTimeline()) return;
  keys.add("Enter", "Show the finding in the timeline", (event) => {
    if (!event.target.classList?.contains("finding")) return false;
    event.target.querySelector(".actions button")?.click();
    return true;
  });
}
