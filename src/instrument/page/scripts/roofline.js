// The roofline: operations per second over operations per byte, both logarithmic; a dot's area is its time.

const ROOFLINE_HEIGHT = 420, ROOFLINE_MARGIN = { left: 64, right: 16, top: 16, bottom: 44 };
const ROOFLINE_COLORS = { matmul: "compute", attention: "communication", convolution: "copies", normalization: "region", softmax: "runtime" };

registerView("roofline", (section, element) => {
  const picture = h("div"), about = h("div", { class: "finding", role: "status", hidden: true });
  const view = { section, chosen: null, about };
  const draw = () => picture.replaceChildren(rooflinePicture(view, Math.max(300, element.clientWidth), draw));
  element.append(
    h("p", { class: "muted" }, `${section.note} ${section.gpu ? `Roofs: ${section.gpu}.` : ""}`),
    rooflineLegend(section), picture, about,
    behind("The operators as a table", dataTable(rooflineTable(section))),
  );
  draw();
  page.on("resize", draw);
});

const rooflineIntensity = (dot) => dot.flops / dot.bytes;
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

function rooflinePicture(view, width, redraw) {
  const { dots, roofs, memory_bytes_per_s: memory } = view.section, { left, right, top, bottom } = ROOFLINE_MARGIN;
  const ridges = memory ? Object.values(roofs).map((rate) => rate / memory) : [];
  const x = rooflineScale([...dots.map(rooflineIntensity), ...ridges.map((ridge) => ridge * 2)], left, width - right);
  const y = rooflineScale([...dots.map(({ flops_per_s: rate }) => rate), ...Object.values(roofs)], ROOFLINE_HEIGHT - bottom, top);
  const most = Math.max(...dots.map(({ gpu_ns: ns }) => ns));
  const radius = ({ gpu_ns: ns }) => 3 + 15 * Math.sqrt(ns / most);
  return svg("svg", { width, height: ROOFLINE_HEIGHT, role: "group", "aria-label": `Roofline of ${dots.length} operators` },
    rooflineAxes(x, y, width),
    memory ? Object.entries(roofs).map(([kind, rate]) => rooflineRoof(kind, rate, memory, x, y)) : [],
    dots.toSorted((one, other) => other.gpu_ns - one.gpu_ns).map((dot) => rooflineDot(view, dot, x.at(rooflineIntensity(dot)), y.at(dot.flops_per_s), radius(dot), redraw)));
}

function rooflineAxes(x, y, width) {
  const { left, right, bottom, top } = ROOFLINE_MARGIN, base = ROOFLINE_HEIGHT - bottom;
  const power = (value) => (value >= 1e12 ? `${value / 1e12} T` : value >= 1e9 ? `${value / 1e9} G` : value >= 1e6 ? `${value / 1e6} M` : String(value));
  return svg("g", { class: "axes" },
    x.ticks.map((value) => [
      svg("line", { x1: x.at(value), x2: x.at(value), y1: top, y2: base }), svg("text", { x: x.at(value), y: base + 16, "text-anchor": "middle" }, String(Number(value.toPrecision(3)))),
    ]),
    y.ticks.map((value) => [
      svg("line", { x1: left, x2: width - right, y1: y.at(value), y2: y.at(value) }), svg("text", { x: left - 6, y: y.at(value) + 4, "text-anchor": "end" }, power(value)),
    ]),
    svg("text", { x: (left + width) / 2, y: ROOFLINE_HEIGHT - 8, "text-anchor": "middle" }, "operations per byte"),
    svg("text", { x: 12, y: top + 4 - 8, "text-anchor": "start" }, "operations per second"));
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
    `${dot.name} ${dot.sizes}`, ["Kind", `${dot.kind}, ${dot.dtype}`], ["GPU time in the window", `${format.ns(dot.gpu_ns)} in ${format.count(dot.calls)} calls`],
    ["Operations per call", format.number(dot.flops)], ["Bytes per call", format.bytes(dot.bytes)], ["Operations per byte", format.number(rooflineIntensity(dot))],
    ["Rate", rooflineRate(dot.flops_per_s)],
    ["Share of the peak", dot.share == null ? "unknown" : `${format.percent(dot.share)}, bound by ${dot.bound}${dot.implausible ? "; implausible: more than the GPU can do" : ""}`],
  ];
}

function rooflineDot(view, dot, x, y, r, redraw) {
  const lines = rooflineLines(dot);
  const choose = () => {
    view.chosen = view.chosen === dot ? null : dot;
    view.about.hidden = view.chosen == null;
    view.about.replaceChildren(...lines.map((line, index) => (index ? h("p", {}, h("span", { class: "muted" }, `${line[0]}: `), line[1]) : h("h3", {}, line))));
    redraw();
  };
  return svg("circle", {
    cx: x, cy: y, r, class: `dot${dot === view.chosen ? " chosen" : ""}`, fill: rooflineColor(dot.kind), tabindex: "0", role: "button",
    "aria-label": lines.map((line) => (Array.isArray(line) ? line.join(" ") : line)).join(", "), "stroke-dasharray": dot.implausible ? "3 2" : null,
    onclick: choose, onkeydown: (event) => { if (event.key === "Enter") choose(); },
    onmousemove: (event) => tooltip.show(event.clientX, event.clientY, lines), onmouseleave: tooltip.hide,
  });
}

function rooflineTable({ dots }) {
  const columns = [
    { title: "Operator", kind: "text" }, { title: "Sizes", kind: "text" }, { title: "Type", kind: "text" }, { title: "Calls", kind: "count" }, { title: "GPU time", kind: "ns" },
    { title: "Operations per call", kind: "number" }, { title: "Bytes per call", kind: "bytes" }, { title: "Operations per byte", kind: "number" },
    { title: "Operations/s", kind: "number" }, { title: "Share of the peak", kind: "percent" }, { title: "Bound by", kind: "text" },
  ];
  const rows = dots.map((dot) => [dot.name, dot.sizes, dot.dtype, dot.calls, dot.gpu_ns, dot.flops, dot.bytes, rooflineIntensity(dot), dot.flops_per_s, dot.share, dot.bound]);
  return { caption: "Operators with known operations, in the window", columns, rows };
}
