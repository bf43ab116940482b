// The plan as a staircase: a row for each change, whose bar ends where the next one begins.

registerView("plan", ({ id, recorded_ns: recorded, rows, notes }, element) => {
  const share = (ns) => `${(100 * ns) / recorded}%`;
  const track = (...pieces) => h("div", { class: "track", "aria-hidden": "true" }, pieces);
  const piece = (kind, from, to) =>
    h("div", { class: `piece ${kind}`, style: { left: share(from), width: share(to - from) } });
  const row = (name, ns, ...pieces) => h("div", { class: "row", "data-value": ns },
    h("div", { class: "name" }, name), track(...pieces), h("div", { class: "value" }, format.ns(ns)));
  element.classList.add("waterfall");
  element.append(
    h("div", { class: "rows" },
      row("as recorded", recorded, piece("", 0, recorded)),
      rows.map(({ text, before_ns: before, step_ns: after }) =>
        row(text, after, piece("", 0, after), piece("less", after, before)))),
    ...notes.map((note) => h("p", { class: "muted" }, note)),
  );
  const columns = { Change: "text", Before: "ns", After: "ns", "Then bound by": "text", "For whatif": "text" };
  const cells = rows.map(({ text, before_ns: before, step_ns: after, bound, change }) =>
    [text, before, after, bound ?? "no single bound", change]);
  element.append(tableBehind("The plan as a table", {
    id, caption: "What each change wins after those before it", columns: tableColumns(columns), rows: cells,
  }));
});
