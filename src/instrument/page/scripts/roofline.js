// The roofline: operations per second over operations per byte, both logarithmic; a dot's area is its time.

const ROOFLINE_HEIGHT = 420, ROOFLINE_DOTS = 300, ROOFLINE_MARGIN = { left: 64, right: 16, top: 26, bottom: 44 };
const ROOFLINE_COLORS = { matmul: "compute", attention: "communication", convolution: "copies", normalization: "region", softmax: "runtime" };

registerView("roofline", (section, element) => {
  const picture = h("div"), about = h("div", { class: "finding", role: "status" });
  const view = { section, dots: section.operators.filter(({ flops, bytes }) => flops && bytes).slice(0, ROOFLINE_DOTS), picture };
  view.draw = () => {
    view.chosen = view.dots[Number(state.get("operator")) - 1];
    about.hidden = !view.chosen;
    about.replaceChildren(...(view.chosen ? rooflineAbout(view.chosen) : []));
    picture.replaceChildren(view.dots.length ? rooflinePicture(view, Math.max(300, picture.clientWidth)) : h("p", {}, "No operator has both operations and bytes."));
  };
  element.append(
    h("p", { class: "muted" }, section.note), rooflineLegend(view), h("div", { class: "roofline-chart" }, picture, about),
    behind("The operators as a table", dataTable({ ...rooflineTable(section), onRow: (row) => rooflineChoose(view, view.dots.indexOf(row.at(-1))) })),
  );
  view.draw();
  rooflineKeys(view);
  state.onChange("operator", view.draw);
  page.on("resize", view.draw);
});

/** Choose a dot, or none; a second time takes the choice back. */
function rooflineChoose(view, index) {
  state.set("operator", view.chosen === view.dots[index] ? null : index + 1 || null);
  tooltip.hide();
  view.draw();
  view.picture.querySelector(`[data-dot="${index}"]`)?.focus();
}

/** Arrows move along the dots, the longest on the GPU first; Enter shows the numbers. */
function rooflineKeys(view) {
  const add = (key, words, act) => keys.add(key, `Roofline, if it has the focus: ${words}`, () => {
    const dot = document.activeElement?.closest?.(".dot");
    if (!dot) return false;
    act(Number(dot.dataset.dot));
    return true;
  });
  const go = (by) => (index) => view.picture.querySelector(`[data-dot="${index + by}"]`)?.focus();
  add("ArrowRight", "the next operator by GPU time", go(1));
  add("ArrowLeft", "the operator before", go(-1));
  add("Enter", "show its numbers", (index) => rooflineChoose(view, index));
}

const rooflineIntensity = ({ flops, bytes }) => (bytes ? flops / bytes : null);
const rooflineRate = (flops) => (flops >= 1e12 ? `${format.number(flops / 1e12)} TFLOP/s` : `${format.number(flops / 1e9)} GFLOP/s`);

function rooflineColor(kind) {
  return `var(--${ROOFLINE_COLORS[kind] ?? "operator"})`;
}

function rooflineLegend({ dots }) {
  const kinds = [...new Set(dots.map(({ kind }) => kind))];
  return h("ul", { class: "legend" }, kinds.map((kind) => h("li", {}, h("span", { class: "swatch", style: { background: rooflineColor(kind) } }), kind)));
}

/** The decades that hold the values, and a function from a value to its place between two pixels. */
function rooflineScale(values, from, to) {
  const low = Math.floor(Math.log10(Math.min(...values))), high = Math.ceil(Math.log10(Math.max(...values)));
  const at = (value) => from + ((Math.log10(value) - low) / Math.max(high - low, 1)) * (to - from);
  return { low, high, at, ticks: Array.from({ length: high - low + 1 }, (_, index) => 10 ** (low + index)) };
}

function rooflinePicture(view, width) {
  const { dots } = view, { roofs, memory_bytes_per_s: memory } = view.section, { left, right, top, bottom } = ROOFLINE_MARGIN;
  const ridges = memory ? Object.values(roofs).map((rate) => rate / memory) : [];
  const x = rooflineScale([...dots.map(rooflineIntensity), ...ridges.map((ridge) => ridge * 2)], left, width - right);
  const y = rooflineScale([...dots.map(({ flops_per_s: rate }) => rate), ...Object.values(roofs)], ROOFLINE_HEIGHT - bottom, top);
  const most = Math.max(...dots.map(({ gpu_ns: ns }) => ns));
  const radius = ({ gpu_ns: ns }) => 3 + 15 * Math.sqrt(ns / most);
  return svg("svg", { width, height: ROOFLINE_HEIGHT, role: "group", "aria-label": `Roofline of ${dots.length} operators` },
    rooflineAxes(x, y, width),
    memory ? Object.entries(roofs).map(([kind, rate]) => rooflineRoof(kind, rate, memory, x, y)) : [],
    dots.map((dot, index) => rooflineDot(view, index, x.at(rooflineIntensity(dot)), y.at(dot.flops_per_s), radius(dot))));
}

function rooflineAxes(x, y, width) {
  const { left, right, bottom, top } = ROOFLINE_MARGIN, base = ROOFLINE_HEIGHT - bottom;
  const power = (value) => {
    const [size, unit] = [[1e15, " P"], [1e12, " T"], [1e9, " G"], [1e6, " M"], [1, ""]].find(([limit]) => value >= limit * 0.99) ?? [1, ""];
    return `${format.number(value / size)}${unit}`;
  };
  return svg("g", { class: "axes" },
    x.ticks.map((value) => [
      svg("line", { x1: x.at(value), x2: x.at(value), y1: top, y2: base }), svg("text", { x: x.at(value), y: base + 16, "text-anchor": "middle" }, format.number(value)),
    ]),
    y.ticks.map((value) => [
      svg("line", { x1: left, x2: width - right, y1: y.at(value), y2: y.at(value) }), svg("text", { x: left - 6, y: y.at(value) + 4, "text-anchor": "end" }, power(value)),
    ]),
    svg("text", { x: (left + width) / 2, y: ROOFLINE_HEIGHT - 8, "text-anchor": "middle" }, "operations per byte"),
    svg("text", { x: 12, y: 12, "text-anchor": "start" }, "operations per second"));
}

/** The roof of a type: rising while memory limits, flat from the ridge on. */
function rooflineRoof(kind, rate, memory, x, y) {
  const start = 10 ** x.low, end = 10 ** x.high, ridge = rate / memory, low = 10 ** y.low;
  const from = Math.max(start, low / memory);
  const points = [[from, from * memory], [Math.min(ridge, end), Math.min(rate, end * memory)], [end, Math.min(rate, end * memory)]];
  return svg("g", { class: "roof" },
    svg("polyline", { points: points.map(([intensity, value]) => `${x.at(intensity)},${y.at(value)}`).join(" ") }),
    svg("text", { x: x.at(end) - 4, y: y.at(Math.min(rate, end * memory)) - 5, "text-anchor": "end" }, `${kind} ${rooflineRate(rate)}`));
}

function rooflineLines(dot) {
  return [
    `${dot.name} ${dot.sizes}`, ["Kind", `${dot.kind}, ${dot.dtype}`], ["GPU time", `${format.ns(dot.gpu_ns)} ${dot.each}`], ["Calls in the window", format.count(dot.calls)],
    ["Operations of a call", format.number(dot.flops)], ["Bytes of a call", format.bytes(dot.bytes)], ["Operations per byte", format.number(rooflineIntensity(dot))],
    ["Rate", rooflineRate(dot.flops_per_s)],
    ["Share of the peak", dot.share == null ? "unknown" : `${format.percent(dot.share)}, bound by ${dot.bound}${dot.implausible ? "; implausible: more than the GPU can do" : ""}`],
  ];
}

function rooflineAbout(dot) {
  const [title, ...lines] = rooflineLines(dot);
  return [h("h3", {}, title), ...lines.map(([label, value]) => h("p", {}, h("span", { class: "muted" }, `${label}: `), value))];
}

function rooflineDot(view, index, x, y, r) {
  const dot = view.dots[index], chosen = dot === view.chosen, lines = rooflineLines(dot);
  const show = (event) => {
    const { right, bottom } = event.currentTarget.getBoundingClientRect();
    tooltip.show(event.clientX ?? right, event.clientY ?? bottom, lines);
  };
  return svg("circle", {
    cx: x, cy: y, r, class: `dot${chosen ? " chosen" : ""}`, fill: rooflineColor(dot.kind), role: "button", "aria-pressed": String(chosen),
    tabindex: view.chosen ? (chosen ? "0" : "-1") : (index ? "-1" : "0"), "data-dot": index,
    "aria-label": lines.flat().join(", "), "stroke-dasharray": dot.implausible ? "3 2" : null,
    onclick: () => rooflineChoose(view, index), onmousemove: show, onmouseleave: tooltip.hide, onfocus: show, onblur: tooltip.hide,
  });
}

function rooflineTable({ operators, each }) {
  const columns = [
    { title: "Operator", kind: "text" }, { title: "Sizes", kind: "text" }, { title: "Kind", kind: "text" }, { title: "Type", kind: "text" }, { title: "Calls in the window", kind: "count" },
    { title: `GPU time ${each}`, kind: "ns" }, { title: "Operations of a call", kind: "number" }, { title: "Bytes of a call", kind: "bytes" },
    { title: "Operations per byte", kind: "number" }, { title: "Operations/s", kind: "number" }, { title: "Share of the peak", kind: "percent" }, { title: "Bound by", kind: "text" },
  ];
  const rows = operators.map((dot) => [
    dot.name, dot.sizes, dot.kind, dot.dtype, dot.calls, dot.gpu_ns, dot.flops, dot.bytes, rooflineIntensity(dot), dot.flops_per_s, dot.share,
    `${dot.bound ?? ""}${dot.implausible ? " (implausible)" : ""}`, dot,
  ]);
  return { caption: "Operators with known operations", columns, rows };
}
