// The flame graph: each node as wide as its time with all nodes inside it, the outermost on top.

const FLAME_ROW = 20, FLAME_LEAST = 2; // pixels: the height of a row, and the width below which nothing is drawn

registerView("flame", (section, element) => {
  const view = flameState(section);
  const picture = h("div", { class: "flame-picture" }), path = h("div", { class: "controls", "aria-label": "Where the graph begins" });
  const found = h("span", { class: "muted", role: "status" });
  const draw = () => {
    flameTotals(view);
    flameDraw(view, picture, path, draw);
    found.textContent = flameFound(view);
  };
  const search = h("input", { type: "search", placeholder: "Search", "aria-label": "Search the flame graph",
    oninput: () => { view.words = search.value.toLowerCase(); draw(); } });
  const choice = (key, label, values) => h("span", { role: "group", "aria-label": label }, values.map(([value, words]) => {
    const button = h("button", { type: "button", "aria-pressed": String(view[key] === value), onclick: () => {
      view[key] = value;
      state.set(key, value);
      for (const each of button.parentNode.children) each.setAttribute("aria-pressed", String(each === button));
      draw();
    } }, words);
    return button;
  }));
  const controls = [choice("flame", "Time", [["cpu", "CPU time"], ["gpu", "GPU time"]])];
  if (section.backward.includes(1)) controls.push(choice("pass", "Pass", [["all", "Both passes"], ["forward", "Forward"], ["backward", "Backward"]]));
  element.append(
    h("p", { class: "muted" }, `Time ${section.each} by nesting. GPU time adds up the durations of the kernels, memcpys and memsets launched inside. Enter or a click enlarges a node.`),
    h("div", { class: "controls" }, controls, search, found), path, picture,
    behind("The nodes as a table", flameTable(view)),
  );
  draw();
  page.on("resize", draw);
  page.on("theme", draw);
});

function flameState(section) {
  const children = section.parent.map(() => []);
  const roots = [];
  section.parent.forEach((above, node) => (above < 0 ? roots : children[above]).push(node));
  const hasGpu = section.gpu.some(Boolean);
  const number = Number(state.get("node"));
  return {
    section, children, roots, words: "", total: null,
    flame: state.get("flame") ?? (hasGpu ? "gpu" : "cpu"), pass: state.get("pass") ?? "all",
    node: state.get("node") && number < section.parent.length ? number : null,
  };
}

/** The name of a node; small nodes below one parent are one. */
function flameName({ section }, node) {
  const name = section.name[node];
  return name < 0 ? `(${format.count(section.joined[node])} smaller)` : section.names[name].replace(/^nn\.Module: /, "");
}

/** Sum up the chosen time of each node and all inside it; children come after their parents. */
function flameTotals(view) {
  const { section, flame, pass } = view;
  const own = section[flame];
  const chosen = pass === "all" ? () => true : (node) => (section.backward[node] === 1) === (pass === "backward");
  const total = own.map((ns, node) => (chosen(node) ? ns : 0));
  for (let node = total.length - 1; node >= 0; node -= 1) {
    if (section.parent[node] >= 0) total[section.parent[node]] += total[node];
  }
  view.total = total;
}

function flameWhole(view) {
  return view.node == null ? view.roots.reduce((sum, node) => sum + view.total[node], 0) : view.total[view.node];
}

function flameDraw(view, picture, path, redraw) {
  const width = Math.max(picture.clientWidth || picture.parentNode.clientWidth, 300);
  const whole = flameWhole(view), boxes = [];
  const place = (node, x, depth) => {
    const span = (view.total[node] / whole) * width;
    if (span < FLAME_LEAST) return;
    boxes.push({ node, x, span, depth });
    let left = x;
    for (const child of flameSorted(view, view.children[node])) {
      place(child, left, depth + 1);
      left += (view.total[child] / whole) * width;
    }
  };
  if (whole > 0) {
    let left = 0;
    for (const node of view.node == null ? flameSorted(view, view.roots) : [view.node]) {
      place(node, left, 0);
      left += (view.total[node] / whole) * width;
    }
  }
  const zoom = (node) => { view.node = node; state.set("node", node); redraw(); };
  const height = FLAME_ROW * (1 + Math.max(0, ...boxes.map(({ depth }) => depth)));
  const label = `Flame graph of ${view.flame === "cpu" ? "CPU" : "GPU"} time, ${format.ns(whole / view.section.steps)} ${view.section.each}`;
  picture.replaceChildren(boxes.length
    ? svg("svg", { width, height, role: "group", "aria-label": label }, boxes.map((box) => flameBox(view, box, whole, zoom, redraw)))
    : h("p", {}, "No time of this kind is recorded."));
  path.replaceChildren(...flamePath(view, zoom));
}

function flameSorted(view, nodes) {
  return nodes.toSorted((one, other) => view.total[other] - view.total[one]);
}

function flameLines(view, node, whole) {
  const { section } = view, steps = section.steps;
  const lines = [
    flameName(view, node),
    ["Time", `${format.ns(view.total[node] / steps)} ${section.each} (${format.percent(view.total[node] / whole)})`],
    ["Of its own", format.ns(section[view.flame][node] / steps)],
    ["Calls", format.count(section.calls[node] / steps)],
  ];
  return section.kind[node] < 0 ? lines : [...lines, ["Kind", `${section.kinds[section.kind[node]]}${section.backward[node] ? ", backward" : ""}`]];
}

function flameBox(view, { node, x, span, depth }, whole, zoom) {
  const kind = view.section.kinds[view.section.kind[node]] ?? "thread";
  const name = flameName(view, node), fits = Math.floor((span - 6) / 7);
  const hit = view.words && name.toLowerCase().includes(view.words);
  const lines = flameLines(view, node, whole);
  const y = depth * FLAME_ROW;
  return svg("g", {
    class: `flame-node${hit ? " hit" : ""}${view.words && !hit ? " dim" : ""}`, tabindex: depth ? "-1" : "0", role: "button", "data-node": node,
    "aria-label": lines.map((line) => (Array.isArray(line) ? line.join(" ") : line)).join(", "),
    onclick: () => zoom(view.node === node ? null : node),
    onkeydown: (event) => flameKey(event, view, node, zoom),
    onmousemove: (event) => tooltip.show(event.clientX, event.clientY, lines),
    onmouseleave: tooltip.hide,
    onfocus: (event) => { const at = event.target.getBoundingClientRect(); tooltip.show(at.x, at.y, lines); },
    onblur: tooltip.hide,
  },
  svg("rect", { x: x + 0.5, y: y + 0.5, width: Math.max(span - 1, 1), height: FLAME_ROW - 1, rx: 2, fill: `var(--${kind === "thread" ? "muted" : kind})` }),
  fits > 2 ? svg("text", { x: x + 4, y: y + 14 }, name.length > fits ? `${name.slice(0, fits - 1)}…` : name) : null);
}

/** Enter enlarges, Escape goes up, arrows move the focus to what is drawn around, inside or beside a node. */
function flameKey(event, view, node, zoom) {
  if (event.key === "Enter") zoom(node);
  else if (event.key === "Escape") zoom(view.node == null || view.section.parent[view.node] < 0 ? null : view.section.parent[view.node]);
  else if (!event.key.startsWith("Arrow")) return;
  event.preventDefault();
  event.stopPropagation();
  const drawn = event.currentTarget.ownerSVGElement ?? document.querySelector(".flame-picture svg");
  const beside = flameSorted(view, view.section.parent[node] < 0 ? view.roots : view.children[view.section.parent[node]]);
  const next = {
    ArrowDown: flameSorted(view, view.children[node])[0], ArrowUp: view.section.parent[node],
    ArrowRight: beside[beside.indexOf(node) + 1], ArrowLeft: beside[beside.indexOf(node) - 1],
  }[event.key];
  drawn?.querySelector(`[data-node="${next}"]`)?.focus();
}

function flamePath(view, zoom) {
  const around = [];
  for (let node = view.node; node != null && node >= 0; node = view.section.parent[node]) around.unshift(node);
  if (!around.length) return [];
  return [h("button", { type: "button", onclick: () => zoom(null) }, "All"), ...around.map((node) =>
    h("button", { type: "button", onclick: () => zoom(node) }, flameName(view, node).slice(0, 60)))];
}

/** The share of the time inside nodes whose names have the words, each moment once. */
function flameFound(view) {
  if (!view.words) return "";
  const sum = (node) => (flameName(view, node).toLowerCase().includes(view.words)
    ? view.total[node] : view.children[node].reduce((total, child) => total + sum(child), 0));
  const roots = view.node == null ? view.roots : [view.node];
  const total = roots.reduce((all, node) => all + sum(node), 0), whole = flameWhole(view);
  return `${format.ns(total / view.section.steps)} ${view.section.each} (${format.percent(whole ? total / whole : 0)}) in "${view.words}"`;
}

function flameTable(view) {
  const { section } = view;
  const totals = (flame) => { const copy = { ...view, flame, pass: "all" }; flameTotals(copy); return copy.total; };
  const cpu = totals("cpu"), gpu = totals("gpu");
  const path = (node) => (node < 0 ? [] : [...path(section.parent[node]), flameName(view, node)]);
  const columns = [
    { title: "Node", kind: "text" }, { title: "CPU time", kind: "ns" }, { title: "CPU time of its own", kind: "ns" },
    { title: "GPU time", kind: "ns" }, { title: "Calls", kind: "count" },
  ];
  const rows = section.parent.map((_, node) => [
    path(node).join(" > "), cpu[node] / section.steps, section.cpu[node] / section.steps, gpu[node] / section.steps, section.calls[node] / section.steps,
  ]).filter((row) => row[1] || row[3]);
  return dataTable({ caption: `All nodes, time ${section.each}`, columns, rows });
}
