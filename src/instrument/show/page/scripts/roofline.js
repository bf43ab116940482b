// The roofline: operations per second over operations per byte, both logarithmic; a dot's area is its time.

const ROOFLINE_HEIGHT = 420;
const ROOFLINE_DOTS = 300;
const ROOFLINE_MARGIN = { left: 64, right: 16, top: 26, bottom: 44 };
const ROOFLINE_COLORS = {
  matmul: "compute",
  attention: "communication",
  convolution: "copies",
  normalization: "region",
  softmax: "runtime",
};

registerView("roofline", (section, element) => {
  const picture = h("div");
  const about = h("div", { class: "finding", role: "status" });
  const dots = section.operators.filter(({ flops, bytes }) => flops && bytes).slice(0, ROOFLINE_DOTS);
  const view = { section, dots, picture };
  view.draw = () => {
    view.chosen = view.dots[Number(state.get("operator")) - 1];
    about.hidden = !view.chosen;
    about.replaceChildren(...(view.chosen ? rooflineAbout(view.chosen) : []));
    picture.replaceChildren(rooflinePicture(view, Math.max(300, picture.clientWidth)));
  };
  const kinds = [...new Set(dots.map(({ kind }) => kind))];
  element.append(
    h("p", { class: "muted" }, section.note),
    legend(kinds.map((kind) => [rooflineColor(kind), kind])),
    h("div", { class: "roofline-chart" }, picture, about),
    tableBehind("The operators as a table", rooflineTable(view)),
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
  const add = (key, words, act) =>
    keys.add(key, `Roofline, if it has the focus: ${words}`, () => {
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
const rooflineRate = (flops) =>
  flops >= 1e12 ? `${format.number(flops / 1e12)} TFLOP/s` : `${format.number(flops / 1e9)} GFLOP/s`;

function rooflineColor(kind) {
  return `var(--${ROOFLINE_COLORS[kind] ?? "operator"})`;
}

/** The decades that hold the values, and a function from a value to its place between two pixels. */
function rooflineScale(values, from, to) {
  const low = Math.floor(Math.log10(Math.min(...values)));
  const high = Math.ceil(Math.log10(Math.max(...values)));
  const at = (value) => from + ((Math.log10(value) - low) / Math.max(high - low, 1)) * (to - from);
  return { low, high, at, ticks: Array.from({ length: high - low + 1 }, (_, index) => 10 ** (low + index)) };
}

function rooflinePicture(view, width) {
  const { dots } = view;
  if (!dots.length) return h("p", {}, "No operator has both operations and bytes.");
  const { roofs, memory_bytes_per_s: memory } = view.section;
  const { left, right, top, bottom } = ROOFLINE_MARGIN;
  const ridges = memory ? Object.values(roofs).map((rate) => rate / memory) : [];
  const intensities = [...dots.map(rooflineIntensity), ...ridges.map((ridge) => ridge * 2)];
  const rates = [...dots.map(({ flops_per_s: rate }) => rate), ...Object.values(roofs)];
  const x = rooflineScale(intensities, left, width - right);
  const y = rooflineScale(rates, ROOFLINE_HEIGHT - bottom, top);
  const most = Math.max(...dots.map(({ gpu_ns: ns }) => ns));
  const radius = ({ gpu_ns: ns }) => 3 + 15 * Math.sqrt(ns / most);
  const circle = (dot, index) =>
    rooflineDot(view, index, { cx: x.at(rooflineIntensity(dot)), cy: y.at(dot.flops_per_s), r: radius(dot) });
  const label = `Roofline of ${dots.length} operators`;
  return svg("svg", { width, height: ROOFLINE_HEIGHT, role: "group", "aria-label": label },
    rooflineAxes(x, y, width),
    memory ? Object.entries(roofs).map(([kind, rate]) => rooflineRoof(kind, rate, memory, x, y)) : [],
    dots.map(circle));
}

function rooflineAxes(x, y, width) {
  const { left, right, bottom, top } = ROOFLINE_MARGIN;
  const base = ROOFLINE_HEIGHT - bottom;
  const text = (at, y, anchor, words) => svg("text", { x: at, y, "text-anchor": anchor }, words);
  return svg("g", { class: "axes" },
    x.ticks.map((value) => [
      svg("line", { x1: x.at(value), x2: x.at(value), y1: top, y2: base }),
      text(x.at(value), base + 16, "middle", format.number(value)),
    ]),
    y.ticks.map((value) => [
      svg("line", { x1: left, x2: width - right, y1: y.at(value), y2: y.at(value) }),
      text(left - 6, y.at(value) + 4, "end", rooflinePower(value)),
    ]),
    text((left + width) / 2, ROOFLINE_HEIGHT - 8, "middle", "operations per byte"),
    text(12, 12, "start", "operations per second"));
}

/** A number of operations per second with the letter of its unit: "1 T". */
function rooflinePower(value) {
  const units = [[1e15, " P"], [1e12, " T"], [1e9, " G"], [1e6, " M"]];
  const [size, unit] = units.find(([limit]) => value >= limit * 0.99) ?? [1, ""];
  return `${format.number(value / size)}${unit}`;
}

/** The roof of a type: rising while memory limits, flat from the ridge on. */
function rooflineRoof(kind, rate, memory, x, y) {
  const start = 10 ** x.low;
  const end = 10 ** x.high;
  const ridge = rate / memory;
  const low = 10 ** y.low;
  const from = Math.max(start, low / memory);
  const points = [
    [from, from * memory],
    [Math.min(ridge, end), Math.min(rate, end * memory)],
    [end, Math.min(rate, end * memory)],
  ];
  const line = points.map(([intensity, value]) => `${x.at(intensity)},${y.at(value)}`).join(" ");
  const place = { x: x.at(end) - 4, y: y.at(points[2][1]) - 5, "text-anchor": "end" };
  return svg("g", { class: "roof" },
    svg("polyline", { points: line }), svg("text", place, `${kind} ${rooflineRate(rate)}`));
}

function rooflineShare({ share, bound, implausible }) {
  if (share == null) return "unknown";
  const doubt = implausible ? "; implausible: more than the GPU can do" : "";
  return `${format.percent(share)}, bound by ${bound}${doubt}`;
}

function rooflineLines(dot) {
  return [
    `${dot.name} ${dot.sizes}`,
    ["Kind", `${dot.kind}, ${dot.dtype}`],
    ["GPU time", `${format.ns(dot.gpu_ns)} ${dot.each}`],
    ["Calls in the window", format.count(dot.calls)],
    ["Operations of a call", format.number(dot.flops)],
    ["Bytes of a call", format.bytes(dot.bytes)],
    ["Operations per byte", format.number(rooflineIntensity(dot))],
    ["Rate", rooflineRate(dot.flops_per_s)],
    ["Share of the peak", rooflineShare(dot)],
  ];
}

function rooflineAbout(dot) {
  const [title, ...lines] = rooflineLines(dot);
  return [h("h3", {}, title), ...lines.map(([label, value]) => labelled(label, value))];
}

function rooflineDot(view, index, place) {
  const dot = view.dots[index];
  const chosen = dot === view.chosen;
  const lines = rooflineLines(dot);
  const show = (event) => {
    const { right, bottom } = event.currentTarget.getBoundingClientRect();
    tooltip.show(event.clientX ?? right, event.clientY ?? bottom, lines);
  };
  return svg("circle", {
    ...place, class: `dot${chosen ? " chosen" : ""}`, fill: rooflineColor(dot.kind),
    "stroke-dasharray": dot.implausible ? "3 2" : null, "data-dot": index,
    role: "button", "aria-pressed": String(chosen), "aria-label": lines.flat().join(", "),
    tabindex: dot === (view.chosen ?? view.dots[0]) ? "0" : "-1",
    onclick: () => rooflineChoose(view, index),
    onmousemove: show, onmouseleave: tooltip.hide, onfocus: show, onblur: tooltip.hide,
  });
}

function rooflineTable(view) {
  const { id, operators, each } = view.section;
  const columns = {
    Operator: "text", Sizes: "text", Kind: "text", Type: "text", "Calls in the window": "count",
    [`GPU time ${each}`]: "ns", "Operations of a call": "number", "Bytes of a call": "bytes",
    "Operations per byte": "number", "Operations/s": "number", "Share of the peak": "percent", "Bound by": "text",
  };
  const rows = operators.map((dot) => [
    dot.name, dot.sizes, dot.kind, dot.dtype, dot.calls,
    dot.gpu_ns, dot.flops, dot.bytes,
    rooflineIntensity(dot), dot.flops_per_s, dot.share,
    `${dot.bound ?? ""}${dot.implausible ? " (implausible)" : ""}`, dot,
  ]);
  const onRow = (row) => rooflineChoose(view, view.dots.indexOf(row.at(-1)));
  return { id, caption: "Operators with known operations", columns: tableColumns(columns), rows, onRow };
}
