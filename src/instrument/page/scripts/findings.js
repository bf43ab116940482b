// The findings: what each would win, its evidence and fix, and the way to its place in the timeline.

registerView("findings", (section, element) => {
  const most = Math.max(...section.findings.map(({ win_ns: ns }) => ns ?? 0), 1);
  const shown = section.findings.filter(({ worth }) => worth), rest = section.findings.filter(({ worth }) => !worth);
  const cards = section.findings.map((found, index) => findingCard(found, index, most));
  element.append(...cards.filter((_, index) => section.findings[index].worth));
  if (!shown.length) element.append(h("p", {}, section.nothing));
  if (rest.length) element.append(behind(`${rest.length} worth less than 1 %`, h("div", {}, cards.filter((_, index) => !section.findings[index].worth))));
  const columns = [
    { title: "Finding", kind: "text" }, { title: "Replayed win", kind: "ns" }, { title: "At most", kind: "ns" }, { title: "Rule", kind: "text" }, { title: "Place", kind: "text" },
  ];
  const rows = section.findings.map(({ title, replayed_ns: replayed, win_ns: win, rule, place }) => [title, replayed, win, rule, place]);
  if (rows.length) element.append(behind("The findings as a table", dataTable({ caption: "Findings", columns, rows })));
  if (section.abstained.length) {
    const reasons = dataTable({ caption: "Rules that lack evidence", columns: [{ title: "Rule", kind: "text" }, { title: "What is missing", kind: "text" }], rows: section.abstained });
    element.append(behind(`${section.abstained.length} ${section.abstained.length === 1 ? "rule" : "rules"} abstained for lack of evidence`, reasons));
  }
  findingsKeys(cards);
  const chosen = Number(state.get("finding"));
  if (chosen && cards[chosen - 1]) requestAnimationFrame(() => cards[chosen - 1].querySelector("button")?.click());
});

function findingCard(found, index, most) {
  return h("article", { class: `finding ${found.severity}`, tabindex: "-1" },
    h("h3", {}, `${index + 1}. ${found.title}`),
    h("p", {}, h("span", { class: "muted" }, "To win: "), found.win_text),
    found.win_ns ? findingWin(found, most) : null,
    found.place ? h("p", {}, h("span", { class: "muted" }, "At: "), h("span", { class: "code" }, found.place)) : null,
    found.fix ? h("p", {}, h("span", { class: "muted" }, "Fix: "), found.fix.text) : null,
    found.fix?.before ? h("pre", {}, findingCode("-", found.fix.before), findingCode("+", found.fix.after)) : null,
    h("details", {}, h("summary", {}, "Evidence"), findingEvidence(found)),
    found.span ? findingActions(found, index) : null,
  );
}

function findingWin({ win_ns: win, replayed_ns: replayed }, most) {
  const width = (ns) => `${(100 * ns) / most}%`;
  return h("div", { class: "win", "aria-hidden": "true" },
    h("div", { class: "most", style: { width: width(win) } }),
    replayed ? h("div", { class: "replayed", style: { width: width(replayed) } }) : null);
}

function findingCode(sign, code) {
  return code.split("\n").filter(Boolean).map((line) => h("div", { class: sign === "-" ? "minus" : "plus" }, `${sign} ${line}`));
}

function findingEvidence({ meaning, evidence, severity, confidence, rule }) {
  return h("div", {},
    h("p", {}, `${meaning} Severity ${severity}, confidence ${confidence}, rule ${rule}.`),
    h("ul", {}, evidence.map(([definition, value]) => h("li", {}, `${definition}: `, h("b", {}, value)))));
}

function findingActions(found, index) {
  const [start, end] = found.span;
  const show = () => {
    state.set("finding", index + 1);
    page.emit("show", { start_ns: start, end_ns: end, label: found.title });
  };
  const perfetto = () => page.emit("perfetto", { start_ns: start, end_ns: end });
  return h("div", { class: "actions" },
    h("button", { type: "button", onclick: show }, "Show in the timeline"),
    page.data.serve.perfetto ? h("button", { type: "button", onclick: perfetto }, "Show in Perfetto") : null);
}

function findingsKeys(cards) {
  let at = -1;
  const go = (by) => () => {
    at = Math.max(0, Math.min(cards.length - 1, at + by));
    cards[at]?.focus();
    cards[at]?.scrollIntoView({ block: "nearest" });
  };
  keys.add("j", "Next finding", go(1));
  keys.add("k", "Previous finding", go(-1));
  keys.add("Enter", "Show the finding in the timeline", (event) => {
    if (!event.target.classList?.contains("finding")) return false;
    event.target.querySelector(".actions button")?.click();
    return true;
  });
}
