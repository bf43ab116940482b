// The difference of two amounts, such as two steps, as a waterfall: from the one before, part by part, to the one
// after. A part is a list: its name in each column of the section, the amounts before and after, and the counts.

const WATERFALL_ROWS = 12;
const WATERFALL_BREAK = 0.25; // of the whole: if less changes, the bars do not begin at 0

registerView("waterfall", (section, element) => {
  const choose = (columns, at) => () => {
    state.set("order", at ? waterfallOrder(section, columns) : null);
    state.set("parts", null);
    draw();
  };
  const orders = section.orders.map((columns, at) =>
    h("button", { type: "button", onclick: choose(columns, at) }, `By ${waterfallOrder(section, columns)}`));
  const crumbs = h("nav", { class: "crumbs", "aria-label": "Parts shown" });
  const chart = h("div", { class: "rows" });
  const draw = () => {
    const view = waterfallView(section, state.get("order"), state.get("parts"));
    const pressed = section.orders.indexOf(view.columns);
    orders.forEach((button, at) => button.setAttribute("aria-pressed", String(at === pressed)));
    crumbs.replaceChildren(...waterfallCrumbs(view, section, draw));
    chart.replaceChildren(...waterfallRows(view, section, draw));
  };
  for (const key of ["order", "parts"]) state.onChange(key, draw);
  draw();
  element.append(h("div", { class: "controls" }, orders), crumbs, chart, waterfallTable(section));
});

/** The word for an order of the columns. */
function waterfallOrder({ columns }, [first]) {
  return columns[first].title.toLowerCase();
}

/** What is shown for a name in a column. */
function waterfallName({ kinds, columns }, column, name) {
  return (column === 0 ? kinds[name]?.words : name) || columns[column].empty;
}

/** The columns in order, the names chosen in the first of them, and the parts with these names. */
function waterfallView(section, order, chosen) {
  const { parts, orders } = section;
  const columns = orders.find((each) => waterfallOrder(section, each) === order) ?? orders[0];
  const path = waterfallPath(chosen).slice(0, columns.length - 1);
  const inside = parts.filter((part) => path.every((name, level) => part[columns[level]] === name));
  return inside.length ? { columns, path, parts: inside } : { columns, path: [], parts };
}

/** The path that the address has; empty if it is not a list of names. */
function waterfallPath(text) {
  try {
    const path = JSON.parse(text ?? "[]");
    return Array.isArray(path) ? path : [];
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
    splits: splits(members), ...waterfallSum(members, section),
  });
  const sorted = (one, other) => Math.abs(other.change) - Math.abs(one.change) || other.before - one.before;
  return [...groups].map(group).sort(sorted);
}

function waterfallSum(parts, { columns }) {
  const sum = (index) => parts.reduce((total, part) => total + part[columns.length + index], 0);
  const [before, after] = [sum(0), sum(1)];
  return { before, after, change: after - before, counts: [sum(2), sum(3)] };
}

/** The rows from the amount before to that after; each begins where the last one ends. */
function waterfallRows(view, section, draw) {
  const groups = waterfallGroups(view, section).filter(({ change }) => change);
  const shown = groups.slice(0, WATERFALL_ROWS);
  const rest = groups.slice(WATERFALL_ROWS);
  if (rest.length === 1) shown.push(rest.pop());
  const changes = [...shown];
  const others = rest.reduce((total, { change }) => total + change, 0);
  if (rest.length) changes.push({ name: `(${rest.length} smaller)`, change: others });
  const { before, after } = waterfallSum(view.parts, section);
  let at = before;
  const bars = changes.map((group) => ({ group, from: at, to: (at += group.change) }));
  const axis = waterfallAxis([before, after, ...bars.map(({ to }) => to)]);
  const amount = format[section.unit];
  return [
    waterfallTotal("before", before, axis, amount),
    ...bars.map((bar) => waterfallRow(bar, axis, section, draw)),
    waterfallTotal("after", after, axis, amount),
    axis.start ? h("p", { class: "muted" }, `The bars begin at ${amount(axis.start)}, not at 0.`) : null,
  ].filter(Boolean);
}

/** The range of the bars: from 0, unless all that changes is a small part of it. */
function waterfallAxis(levels) {
  const low = Math.min(...levels);
  const high = Math.max(...levels);
  const range = high - low;
  const start = range && range < WATERFALL_BREAK * high ? Math.max(low - 0.5 * range, 0) : 0;
  return { start, share: (value) => (100 * (value - start)) / (high - start || 1) };
}

function waterfallTotal(name, value, { start, share }, amount) {
  const bar = h("div", { class: start ? "piece cut" : "piece", style: { left: 0, width: `${share(value)}%` } });
  return h("div", { class: "row total", "data-value": value },
    h("div", { class: "name" }, name),
    h("div", { class: "track", "aria-hidden": "true" }, bar),
    h("div", { class: "value" }, amount(value)));
}

function waterfallRow({ group, from, to }, { share }, section, draw) {
  const { name, change, kind, column, path, splits } = group;
  const left = share(Math.min(from, to));
  const style = { left: `${left}%`, width: `${share(Math.max(from, to)) - left}%` };
  const lines = waterfallTooltip(group, section);
  const words = splits ? h("button", { type: "button", onclick: waterfallGo(path, draw) }, name) : name;
  return h("div", {
    class: "row", "data-value": change,
    onmousemove: (event) => tooltip.show(event.clientX, event.clientY, lines), onmouseleave: tooltip.hide,
  },
  h("div", { class: "name" }, column === 0 ? swatch(`var(--${section.kinds[kind].class})`) : null, words),
  h("div", { class: "track", "aria-hidden": "true" },
    h("div", { class: `piece ${change > 0 ? "more" : "less"}`, style })),
  h("div", { class: "value" }, `${change > 0 ? "+" : ""}${format[section.unit](change)}`));
}

function waterfallTooltip({ name, change, kind, column, before, after, counts }, { unit, counted, kinds }) {
  const difference = ["difference", `${format.count(change)} ${unit}`];
  if (!counts) return [name, difference];
  const lines = [
    name,
    difference,
    ["before", format[unit](before)],
    ["after", format[unit](after)],
    [counted, counts.map(format.count).join(" to ")],
  ];
  return column === 0 ? [...lines, kinds[kind].definition] : lines;
}

function waterfallTable({ id, unit, counted, caption, columns: names, kinds, parts }) {
  const columns = {
    ...Object.fromEntries(names.map(({ title }) => [title, "text"])), Before: unit, After: unit, Difference: unit,
    [`Difference, ${unit}`]: "count", [`Before, ${counted}`]: "count", [`After, ${counted}`]: "count",
  };
  const rows = parts.map((part) => {
    const [before, after, ...counts] = part.slice(names.length);
    const change = after - before;
    return [kinds[part[0]].words, ...part.slice(1, names.length), before, after, change, change, ...counts];
  });
  return tableBehind("All parts as a table", { id, caption, columns: tableColumns(columns), rows });
}
