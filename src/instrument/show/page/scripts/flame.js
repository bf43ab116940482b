// The flame graph: each node as wide as its time, or its memory, with all nodes inside it, the outermost on top.
// The section has the unit and the words for the amounts, and one tree or several. Each amount has two parts, such
// as that outside and that inside backward passes.

const FLAME_ROW = 20; // pixels: the height of a row
const FLAME_LEAST = 2; // pixels: the width below which nothing is drawn

registerView("flame", (section, element) => {
  const trees = Object.entries(section.views).map(([value, { title }]) => [value, title]);
  const both = Object.values(section.views).some(({ values }) => values.every((part) => part.some(Boolean)));
  const view = {
    section, trees, parts: both ? section.parts : section.parts.slice(0, 1), shared: flameShared(section.names),
    about: h("p", { class: "muted" }), picture: h("div", { class: "flame-picture" }), colors: h("div"),
    path: h("div", { class: "controls", role: "group", "aria-label": "Where the graph begins" }),
    search: h("input", { type: "search", placeholder: "Search", "aria-label": `Search: ${section.title}` }),
    found: h("span", { class: "muted", role: "status" }),
  };
  view.search.addEventListener("input", () => flameSet(view, "search", view.search.value));
  view.choices = [
    flameChoice(view, "by", section.words.views, trees),
    flameChoice(view, "part", section.words.parts, view.parts),
  ];
  const groups = view.choices.map(({ group }) => group);
  element.append(view.about, h("div", { class: "controls" }, groups, view.search, view.found));
  element.append(view.path, view.picture, view.colors, ...trees.map((tree) => flameTable(section, ...tree)));
  flameDraw(view);
  flameKeys(view);
  const draw = () => flameDraw(view);
  for (const key of ["by", "part", "node", "search"]) state.onChange(`${section.id}.${key}`, draw);
  page.on("resize", draw);
});

function flameDraw(view) {
  flameRead(view);
  view.about.textContent = `${view.section.words.value} ${view.section.each}. ${view.tree.note}`;
  view.choices.forEach(({ press }) => press());
  view.path.replaceChildren(...flamePath(view));
  view.picture.replaceChildren(flamePicture(view));
  view.colors.replaceChildren(flameLegend(view));
  view.found.textContent = flameFound(view);
}

function flameSet(view, key, text) {
  state.set(`${view.section.id}.${key}`, text);
  flameDraw(view);
}

/** A group of buttons, of which one is pressed. */
function flameChoice(view, key, label, values) {
  const choose = (value) => () => flameSet(view, key, value === flameUsual(view)[key] ? null : value);
  const buttons = values.map(([value, words]) =>
    h("button", { type: "button", "data-value": value, onclick: choose(value) }, words));
  const press = () =>
    buttons.forEach((each) => each.setAttribute("aria-pressed", String(each.dataset.value === view[key])));
  return { group: values.length > 1 ? h("span", { role: "group", "aria-label": label }, buttons) : null, press };
}

const flameUsual = ({ trees, parts }) => ({ by: trees.at(-1)[0], part: parts[0][0] });

/** Read the state (which tree, which part, the words, and the node that is enlarged, or -1), and sum up. */
function flameRead(view) {
  const kept = (key) => state.get(`${view.section.id}.${key}`);
  const chosen = (key, values) => values.find(([value]) => value === kept(key))?.[0] ?? flameUsual(view)[key];
  view.by = chosen("by", view.trees);
  view.part = chosen("part", view.parts);
  view.tree = view.section.views[view.by];
  const part = view.section.parts.findIndex(([value]) => value === view.part);
  view.own = flameOfPart(view.tree.values, part);
  view.counts = flameOfPart(view.tree.counts, part);
  view.total = flameTotals(view.tree.parent, view.own);
  view.children = view.tree.parent.map(() => []);
  view.roots = [];
  view.tree.parent.forEach((above, node) => {
    if (view.total[node]) (view.children[above] ?? view.roots).push(node);
  });
  const words = kept("search") ?? "";
  if (view.search.value !== words) view.search.value = words;
  view.words = words.toLowerCase();
  view.node = flameNode(view, kept("node") ?? "");
  view.whole = view.node < 0 ? view.roots.reduce((sum, node) => sum + view.total[node], 0) : view.total[view.node];
}

/** The values of a part: 1, 2, or 0 for both. */
function flameOfPart([first, second], part) {
  return first.map((value, node) => (part === 2 ? 0 : value) + (part === 1 ? 0 : second[node]));
}

/** The amount of each node with all nodes inside it, which come after it. */
function flameTotals(parent, own) {
  const total = [...own];
  for (let node = total.length - 1; node >= 0; node -= 1) {
    if (parent[node] >= 0) total[parent[node]] += total[node];
  }
  return total;
}

/** The name of a node; small nodes below one parent are one. */
function flameName({ section, tree }, node) {
  const name = tree.name[node];
  return name < 0 ? `(${format.count(tree.joined[node])} smaller)` : section.names[name];
}

/** The names that several kinds of nodes have, or several files. */
function flameShared(names) {
  const seen = new Set();
  return new Set(names.filter((name) => seen.size === seen.add(name).size));
}

/** What tells a node from those beside it: its name, with its kind and its file where others share the name. */
function flameUniqueName(view, node) {
  const name = flameName(view, node);
  const about = view.section.about[view.tree.name[node]];
  return view.shared.has(name) ? `${name} (${[flameKind(view, node), about].filter(Boolean).join(", ")})` : name;
}

function flameKind({ section, tree }, node) {
  return section.kinds[tree.kind[node]] ?? "smaller";
}

const FLAME_COLORS = {
  thread: ["other", 35], peak: ["other", 35], smaller: ["line", 60], unknown: ["line", 60],
  operator: ["operator", 25], line: ["operator", 25], inferred: ["mark", 30],
};

function flameColor(kind) {
  const [name, share] = FLAME_COLORS[kind] ?? [kind, 55];
  return `color-mix(in srgb, var(--${name}) ${share}%, var(--panel))`;
}

/** The nodes around a node and itself, the outermost first. */
function flameAround({ tree }, node) {
  return node < 0 ? [] : [...flameAround({ tree }, tree.parent[node]), node];
}

/** The names on the way to a node, without the first root: an address fits the trees of CPU and of GPU time. */
function flameAddress(view, node) {
  const around = flameAround(view, node);
  const inside = around[0] === view.roots[0] && around.length > 1 ? around.slice(1) : around;
  return inside.map((each) => flameUniqueName(view, each)).join(" > ");
}

/** The node with an address, or the innermost node on the way to it; -1 if there is none. */
function flameNode(view, address) {
  const descend = (node, rest) => {
    for (const child of node < 0 ? view.roots : view.children[node]) {
      const name = flameUniqueName(view, child);
      if (rest === name) return child;
      if (rest.startsWith(`${name} > `)) return descend(child, rest.slice(name.length + 3));
    }
    return node;
  };
  const found = address ? descend(-1, address) : -1;
  if (found >= 0 || !address || !view.roots.length) return found;
  const below = descend(view.roots[0], address);
  return below === view.roots[0] ? -1 : below;
}

function flameZoom(view, node, focused = node) {
  tooltip.hide();
  flameSet(view, "node", node < 0 ? null : flameAddress(view, node));
  view.picture.querySelector(`[data-node="${focused}"]`)?.focus();
}

/** The nodes that are drawn, with their place in pixels. */
function flameBoxes(view, width) {
  const boxes = [];
  const scale = width / view.whole;
  const place = (node, x, depth) => {
    const span = view.total[node] * scale;
    if (span < FLAME_LEAST) return;
    boxes.push({ node, x, span, depth });
    placeAll(view.children[node], x, depth + 1);
  };
  const placeAll = (nodes, x, depth) =>
    nodes.reduce((left, node) => {
      place(node, left, depth);
      return left + view.total[node] * scale;
    }, x);
  placeAll(view.node < 0 ? view.roots : [view.node], 0, 0);
  return boxes;
}

function flamePicture(view) {
  if (!view.whole) return h("p", {}, "Nothing of this kind is recorded.");
  const width = Math.max(view.picture.clientWidth, 300);
  const boxes = flameBoxes(view, width);
  const height = FLAME_ROW * (1 + Math.max(...boxes.map(({ depth }) => depth)));
  const label = `${view.section.title}: ${view.tree.title}, ${flameAmount(view, view.whole)}`;
  const nodes = boxes.map((box, index) => flameBox(view, box, index === 0));
  return svg("svg", { width, height, role: "group", "aria-label": label }, nodes);
}

/** An amount in words: "1.20 ms per step". */
function flameAmount({ section: { unit, steps, each } }, value) {
  return `${format[unit](value / steps)} ${each}`;
}

function flameLines(view, node) {
  const { unit, steps, each, words, about } = view.section;
  return [
    flameName(view, node),
    [words.value, `${flameAmount(view, view.total[node])} (${format.percent(view.total[node] / view.whole)})`],
    words.own && [words.own, format[unit](view.own[node] / steps)],
    [words.count, `${format.count(view.counts[node] / steps)} ${each}`],
    ["Kind", classWords(flameKind(view, node))],
    about[view.tree.name[node]],
  ].filter(Boolean);
}

function flameBox(view, { node, x, span, depth }, first) {
  const name = flameName(view, node);
  const fits = Math.floor((span - 6) / 7);
  const lines = flameLines(view, node);
  const y = depth * FLAME_ROW;
  const hit = name.toLowerCase().includes(view.words) ? " hit" : " dim";
  const fill = flameColor(flameKind(view, node));
  const show = (event) => {
    const { left, bottom } = event.currentTarget.getBoundingClientRect();
    tooltip.show(event.clientX ?? Math.max(left, 0), event.clientY ?? bottom, lines);
  };
  return svg("g", {
    class: `flame-node${view.words ? hit : ""}`, tabindex: first ? "0" : "-1", role: "button", "data-node": node,
    "aria-label": lines.map((line) => (Array.isArray(line) ? line.join(" ") : line)).join(", "),
    onclick: () => flameZoom(view, view.node === node ? -1 : node),
    onmousemove: show, onmouseleave: tooltip.hide, onfocus: show, onblur: tooltip.hide,
  },
  svg("rect", { x: x + 0.5, y: y + 0.5, width: Math.max(span - 1, 1), height: FLAME_ROW - 1, rx: 2, fill }),
  fits > 2 ? svg("text", { x: x + 4, y: y + 14 }, cutTo(name, fits)) : null);
}

/** Enter enlarges, Escape goes up, arrows move the focus to what is drawn around, inside or beside a node. */
function flameKeys(view) {
  const add = (key, words, act) =>
    keys.add(key, `${view.section.title}, if it has the focus: ${words}`, () => {
      const box = document.activeElement?.closest?.(".flame-node");
      if (!box || !view.picture.contains(box)) return false;
      act(Number(box.dataset.node));
      return true;
    });
  const focus = (node) => view.picture.querySelector(`[data-node="${node}"]`)?.focus();
  const beside = (by) => (node) => {
    const row = view.children[view.tree.parent[node]] ?? view.roots;
    focus(row[row.indexOf(node) + by]);
  };
  add("Enter", "enlarge the node", (node) => flameZoom(view, node));
  add(" ", "enlarge the node", (node) => flameZoom(view, node));
  add("Escape", "one node out", (node) => flameZoom(view, view.tree.parent[view.node] ?? -1, node));
  add("ArrowUp", "the node around", (node) => focus(view.tree.parent[node]));
  add("ArrowDown", "the largest node inside", (node) =>
    focus(view.children[node].toSorted((one, other) => view.total[other] - view.total[one])[0]),
  );
  add("ArrowLeft", "the node before", beside(-1));
  add("ArrowRight", "the next node", beside(1));
}

function flamePath(view) {
  const button = (node, words) => h("button", { type: "button", onclick: () => flameZoom(view, node) }, words);
  if (view.node < 0) return [];
  const around = flameAround(view, view.node).map((node) => button(node, flameName(view, node).slice(0, 60)));
  return [button(-1, "All"), ...around];
}

function flameLegend(view) {
  const kinds = new Set(view.tree.kind.map((_, node) => flameKind(view, node)));
  return legend([...kinds].map((kind) => [flameColor(kind), classWords(kind)]));
}

/** The amount inside nodes whose names contain the words; nodes inside such a node do not count again. */
function flameFound(view) {
  const { words, whole } = view;
  if (!words) return "";
  const add = (sum, node) => sum + inside(node);
  const inside = (node) =>
    flameName(view, node).toLowerCase().includes(words) ? view.total[node] : view.children[node].reduce(add, 0);
  const total = (view.node < 0 ? view.roots : [view.node]).reduce(add, 0);
  return `${flameAmount(view, total)} (${format.percent(whole ? total / whole : 0)}) in "${words}"`;
}

function flameTable(section, key, title) {
  const { unit, steps, each, words } = section;
  const tree = section.views[key];
  const paths = [];
  tree.parent.forEach((above, node) => paths.push([...(paths[above] ?? []), flameName({ section, tree }, node)]));
  const own = flameOfPart(tree.values, 0);
  const sums = [
    [words.value, unit, flameTotals(tree.parent, own)],
    [words.second, unit, flameTotals(tree.parent, tree.values[1])],
    [words.own, unit, own],
    [words.count, "count", flameOfPart(tree.counts, 0)],
  ].filter(([head]) => head);
  const heads = Object.fromEntries(sums.map(([head, kind]) => [head, kind]));
  const rows = paths.map((path, node) => [
    path.at(-1), classWords(flameKind({ section, tree }, node)),
    ...sums.map(([, , values]) => values[node] / steps), path.slice(0, -1).join(" > "),
  ]);
  return tableBehind(`The nodes as a table: ${title}`, {
    id: `${section.id}-${key}`, caption: `All nodes: ${title}, ${words.value.toLowerCase()} ${each}`,
    columns: tableColumns({ Node: "text", Kind: "text", ...heads, Path: "text" }),
    rows: tableSorted(rows, 2, unit, false),
  });
}
