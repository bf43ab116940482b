// The flame graph: each node as wide as its time with all nodes inside it, the outermost on top.

const FLAME_ROW = 20; // pixels: the height of a row
const FLAME_LEAST = 2; // pixels: the width below which nothing is drawn
const FLAME_TIMES = [
  ["cpu", "CPU time"],
  ["gpu", "GPU time"],
];
const FLAME_PASSES = [
  ["all", "Both passes"],
  ["forward", "Forward and other"],
  ["backward", "Backward"],
];

registerView("flame", (section, element) => {
  const times = FLAME_TIMES.filter(([value]) => section.views[value]);
  const backward = Object.values(section.views).some(({ ns }) => ns[1].some(Boolean));
  const view = {
    section, times, passes: backward ? FLAME_PASSES : FLAME_PASSES.slice(0, 1),
    about: h("p", { class: "muted" }), picture: h("div", { class: "flame-picture" }), colors: h("div"),
    path: h("div", { class: "controls", role: "group", "aria-label": "Where the graph begins" }),
    search: h("input", { type: "search", placeholder: "Search", "aria-label": "Search the flame graph" }),
    found: h("span", { class: "muted", role: "status" }),
  };
  view.search.addEventListener("input", () => flameSet(view, "search", view.search.value));
  view.choices = [flameChoice(view, "flame", "Time", times), flameChoice(view, "pass", "Pass", view.passes)];
  const groups = view.choices.map(({ group }) => group);
  element.append(view.about, h("div", { class: "controls" }, groups, view.search, view.found));
  element.append(view.path, view.picture, view.colors, ...times.map((time) => flameTable(section, ...time)));
  flameDraw(view);
  flameKeys(view);
  const draw = () => flameDraw(view);
  for (const key of ["flame", "pass", "node", "search"]) state.onChange(key, draw);
  page.on("resize", draw);
});

function flameDraw(view) {
  flameRead(view);
  view.about.textContent = `Time ${view.section.each}. ${view.tree.note}`;
  view.choices.forEach(({ press }) => press());
  view.path.replaceChildren(...flamePath(view));
  view.picture.replaceChildren(flamePicture(view));
  view.colors.replaceChildren(flameLegend(view));
  view.found.textContent = flameFound(view);
}

function flameSet(view, key, text) {
  state.set(key, text);
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

const flameUsual = ({ times }) => ({ flame: times.at(-1)[0], pass: "all" });

/** Read the state (which tree, which pass, the words, and the node that is enlarged, or -1), and sum up. */
function flameRead(view) {
  const chosen = (key, values) =>
    values.find(([value]) => value === state.get(key))?.[0] ?? flameUsual(view)[key];
  view.flame = chosen("flame", view.times);
  view.pass = chosen("pass", view.passes);
  view.tree = view.section.views[view.flame];
  view.own = flameOfPass(view.tree.ns, view.pass);
  view.calls = flameOfPass(view.tree.calls, view.pass);
  view.total = flameTotals(view.tree.parent, view.own);
  view.children = view.tree.parent.map(() => []);
  view.roots = [];
  view.tree.parent.forEach((above, node) => {
    if (view.total[node]) (view.children[above] ?? view.roots).push(node);
  });
  const words = state.get("search") ?? "";
  if (view.search.value !== words) view.search.value = words;
  view.words = words.toLowerCase();
  view.node = flameNode(view, state.get("node") ?? "");
  view.whole = view.node < 0 ? view.roots.reduce((sum, node) => sum + view.total[node], 0) : view.total[view.node];
}

/** The values of a pass: outside backward passes, inside them, or both. */
function flameOfPass([outside, inside], pass) {
  return outside.map((value, node) => (pass === "backward" ? 0 : value) + (pass === "forward" ? 0 : inside[node]));
}

/** The time of each node with all nodes inside it, which come after it. */
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

function flameKind({ section, tree }, node) {
  return section.kinds[tree.kind[node]] ?? "smaller";
}

const FLAME_COLORS = { thread: ["other", 35], smaller: ["line", 60], operator: ["operator", 25] };

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
  return inside.map((each) => flameName(view, each)).join(" > ");
}

/** The node with an address, or the innermost node on the way to it; -1 if there is none. */
function flameNode(view, address) {
  const descend = (node, rest) => {
    for (const child of node < 0 ? view.roots : view.children[node]) {
      const name = flameName(view, child);
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
  if (!view.whole) return h("p", {}, "No time of this kind is recorded.");
  const { flame, whole, section } = view;
  const width = Math.max(view.picture.clientWidth, 300);
  const boxes = flameBoxes(view, width);
  const height = FLAME_ROW * (1 + Math.max(...boxes.map(({ depth }) => depth)));
  const time = `${format.ns(whole / section.steps)} ${section.each}`;
  const label = `Flame graph of ${flame.toUpperCase()} time, ${time}`;
  const nodes = boxes.map((box, index) => flameBox(view, box, index === 0));
  return svg("svg", { width, height, role: "group", "aria-label": label }, nodes);
}

function flameLines(view, node) {
  const { steps, each } = view.section;
  return [
    flameName(view, node),
    ["Time", `${format.ns(view.total[node] / steps)} ${each} (${format.percent(view.total[node] / view.whole)})`],
    ["Self time", format.ns(view.own[node] / steps)],
    ["Calls", `${format.count(view.calls[node] / steps)} ${each}`],
    ["Kind", classWords(flameKind(view, node))],
  ];
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
    keys.add(key, `Flame graph, if it has the focus: ${words}`, () => {
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

/** The time inside nodes whose names contain the words; nodes inside such a node do not count again. */
function flameFound(view) {
  const { words, whole, section } = view;
  if (!words) return "";
  const add = (sum, node) => sum + inside(node);
  const inside = (node) =>
    flameName(view, node).toLowerCase().includes(words) ? view.total[node] : view.children[node].reduce(add, 0);
  const total = (view.node < 0 ? view.roots : [view.node]).reduce(add, 0);
  const time = `${format.ns(total / section.steps)} ${section.each}`;
  return `${time} (${format.percent(whole ? total / whole : 0)}) in "${words}"`;
}

function flameTable(section, time, words) {
  const { steps, each, views } = section;
  const tree = views[time];
  const paths = [];
  const own = flameOfPass(tree.ns, "all");
  const calls = flameOfPass(tree.calls, "all");
  const times = [flameTotals(tree.parent, own), flameTotals(tree.parent, tree.ns[1]), own, calls];
  tree.parent.forEach((above, node) => paths.push([...(paths[above] ?? []), flameName({ section, tree }, node)]));
  const columns = {
    Node: "text", Kind: "text", Time: "ns", "In backward passes": "ns", "Self time": "ns", Calls: "count",
    Path: "text",
  };
  const rows = paths.map((path, node) => [
    path.at(-1), flameKind({ section, tree }, node), ...times.map((values) => values[node] / steps),
    path.slice(0, -1).join(" > "),
  ]);
  return tableBehind(`The nodes by ${words} as a table`, {
    id: `${section.id}-${time}`, caption: `All nodes, ${words} ${each}`, columns: tableColumns(columns),
    rows: tableSorted(rows, 2, "ns", false),
  });
}
