// The difference of two steps as a waterfall: from the time before, part by part, to the time after.

const WATERFALL_ROWS = 12;
const WATERFALL_BREAK = 0.25; // of the whole: if less changes, the bars do not begin at 0
const WATERFALL_COLUMNS = ["kind", "region", "operator", "kernel"];
const WATERFALL_EMPTY = ["", "outside regions", "no operator", "no kernel"];

registerView("waterfall", (section, element) => {
  const choose = (order) => () => {
    state.set("order", order === "kind" ? null : order);
    state.set("parts", null);
    draw();
  };
  const orders = ["kind", "region"].map((order) =>
    h("button", { type: "button", onclick: choose(order) }, `By ${order}`));
  const crumbs = h("nav", { class: "crumbs", "aria-label": "Parts shown" });
  const chart = h("div", { class: "rows" });
  const draw = () => {
    const view = waterfallView(section.parts, state.get("order"), state.get("parts"));
    orders.forEach((button, column) => button.setAttribute("aria-pressed", String(view.columns[0] === column)));
    crumbs.replaceChildren(...waterfallCrumbs(view, section, draw));
    chart.replaceChildren(...waterfallRows(view, section, draw));
  };
  for (const key of ["order", "parts"]) state.onChange(key, draw);
  draw();
  element.append(h("div", { class: "controls" }, orders), crumbs, chart, waterfallTable(section));
});

/** What is shown for a name in a column. */
function waterfallName({ kinds }, column, name) {
  return (column === 0 ? kinds[name]?.words : name) || WATERFALL_EMPTY[column];
}

/** The columns in order, the names chosen in the first of them, and the parts with these names. */
function waterfallView(parts, order, chosen) {
  const columns = order === "region" ? [1, 0, 2, 3] : [0, 1, 2, 3];
  const path = waterfallPath(chosen);
  const inside = parts.filter((part) => path.every((name, level) => part[columns[level]] === name));
  return inside.length ? { columns, path, parts: inside } : { columns, path: [], parts };
}

/** The path that the address has; empty if it is not a list of names. */
function waterfallPath(text) {
  try {
    const path = JSON.parse(text ?? "[]");
    return Array.isArray(path) ? path.slice(0, WATERFALL_COLUMNS.length - 1) : [];
  } catch {
    return [];
  }
}

function waterfallGo(path, draw) {
  return () => {
    state.set("parts", path.length ? JSON.stringify(path) : null);
    draw();
    document.querySelector(".waterfall .crumbs button:last-of-type")?.focus();
  };
}

function waterfallCrumbs({ columns, path }, section, draw) {
  if (!path.length) return [];
  const names = path.map((name, level) => waterfallName(section, columns[level], name));
  const crumb = (name, level) => h("button", {
    type: "button", "aria-current": level === path.length ? "true" : null,
    onclick: waterfallGo(path.slice(0, level), draw),
  }, name);
  const next = () => h("span", { class: "muted", "aria-hidden": "true" }, " › ");
  return [crumb("All parts", 0), ...names.flatMap((name, level) => [next(), crumb(name, level + 1)])];
}

/** The parts by the first column in which they differ, those with the largest difference first. */
function waterfallGroups({ columns, path, parts }, section) {
  let level = path.length;
  const prefix = [...path];
  const same = (column) => parts.every((part) => part[column] === parts[0][column]);
  while (level < columns.length - 1 && same(columns[level])) prefix.push(parts[0][columns[level++]]);
  const column = columns[level];
  const groups = new Map();
  for (const part of parts) {
    if (groups.has(part[column])) groups.get(part[column]).push(part);
    else groups.set(part[column], [part]);
  }
  const splits = (members) =>
    columns.slice(level + 1).some((rest) => members.some((part) => part[rest] !== members[0][rest]));
  const group = ([name, members]) => ({
    name: waterfallName(section, column, name), path: [...prefix, name], kind: members[0][0], column,
    splits: splits(members), ...waterfallSum(members),
  });
  const sorted = (one, other) => Math.abs(other.ns) - Math.abs(one.ns) || other.before - one.before;
  return [...groups].map(group).sort(sorted);
}

function waterfallSum(parts) {
  const sum = (index) => parts.reduce((total, part) => total + part[index], 0);
  const [before, after] = [sum(4), sum(5)];
  return { before, after, ns: after - before, calls: [sum(6), sum(7)] };
}

/** The rows from the time before to the time after; each begins where the last one ends. */
function waterfallRows(view, section, draw) {
  const groups = waterfallGroups(view, section).filter(({ ns }) => ns);
  const shown = groups.slice(0, WATERFALL_ROWS);
  const rest = groups.slice(WATERFALL_ROWS);
  if (rest.length === 1) shown.push(rest.pop());
  const changes = [...shown];
  const others = rest.reduce((total, { ns }) => total + ns, 0);
  if (rest.length) changes.push({ name: `(${rest.length} smaller)`, ns: others });
  const { before, after } = waterfallSum(view.parts);
  let at = before;
  const bars = changes.map((group) => ({ group, from: at, to: (at += group.ns) }));
  const axis = waterfallAxis([before, after, ...bars.map(({ to }) => to)]);
  return [
    waterfallTotal("before", before, axis),
    ...bars.map((bar) => waterfallRow(bar, axis, section.kinds, draw)),
    waterfallTotal("after", after, axis),
    axis.start ? h("p", { class: "muted" }, `The bars begin at ${format.ns(axis.start)}, not at 0.`) : null,
  ].filter(Boolean);
}

/** The range of the bars: from 0, unless all that changes is a small part of it. */
function waterfallAxis(levels) {
  const low = Math.min(...levels);
  const high = Math.max(...levels);
  const range = high - low;
  const start = range && range < WATERFALL_BREAK * high ? Math.max(low - 0.5 * range, 0) : 0;
  return { start, share: (ns) => (100 * (ns - start)) / (high - start || 1) };
}

function waterfallTotal(name, ns, { start, share }) {
  const bar = h("div", { class: start ? "piece cut" : "piece", style: { left: 0, width: `${share(ns)}%` } });
  return h("div", { class: "row total", "data-ns": ns },
    h("div", { class: "name" }, name),
    h("div", { class: "track", "aria-hidden": "true" }, bar),
    h("div", { class: "value" }, format.ns(ns)));
}

function waterfallRow({ group, from, to }, { share }, kinds, draw) {
  const { name, ns, kind, column, path, splits } = group;
  const left = share(Math.min(from, to));
  const style = { left: `${left}%`, width: `${share(Math.max(from, to)) - left}%` };
  const lines = waterfallTooltip(group, kinds);
  const words = splits ? h("button", { type: "button", onclick: waterfallGo(path, draw) }, name) : name;
  return h("div", {
    class: "row", "data-ns": ns,
    onmousemove: (event) => tooltip.show(event.clientX, event.clientY, lines), onmouseleave: tooltip.hide,
  },
  h("div", { class: "name" }, column === 0 ? swatch(`var(--${kinds[kind].class})`) : null, words),
  h("div", { class: "track", "aria-hidden": "true" },
    h("div", { class: `piece ${ns > 0 ? "slower" : "faster"}`, style })),
  h("div", { class: "value" }, `${ns > 0 ? "+" : ""}${format.ns(ns)}`));
}

function waterfallTooltip({ name, ns, kind, column, before, after, calls }, kinds) {
  const difference = ["difference", `${format.count(ns)} ns`];
  if (!calls) return [name, difference];
  const lines = [
    name,
    difference,
    ["before", format.ns(before)],
    ["after", format.ns(after)],
    ["calls", calls.map(format.count).join(" to ")],
  ];
  return column === 0 ? [...lines, kinds[kind].definition] : lines;
}

function waterfallTable({ id, kinds, parts }) {
  const names = WATERFALL_COLUMNS.map((name) => [name[0].toUpperCase() + name.slice(1), "text"]);
  const columns = {
    ...Object.fromEntries(names), Before: "ns", After: "ns", Difference: "ns", "Difference, ns": "count",
    "Calls before": "count", "Calls after": "count",
  };
  const rows = parts.map((part) => {
    const [before, after] = part.slice(4, 6);
    return [kinds[part[0]].words, ...part.slice(1, 6), after - before, after - before, ...part.slice(6)];
  });
  const caption = "The parts of the two median steps; the differences add up";
  return tableBehind("All parts as a table", { id, caption, columns: tableColumns(columns), rows });
}
