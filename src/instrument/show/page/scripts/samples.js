// The lengths of steps as dots on one axis, a row for each recording, with the median marked.

const SAMPLES_PITCH = 7; // pixels from dot to dot in a stack
const SAMPLES_COLUMNS = 160; // stacks on the axis
const SAMPLES_MOST = 150; // pixels: the height of the tallest stack

registerView("samples", (section, element) => {
  const { groups, detectable, note } = section;
  const axis = samplesAxis(groups.flatMap(({ lengths_ns: lengths }) => lengths));
  const band = (index) => (index && detectable != null ? samplesBand(groups[0], detectable, axis) : null);
  element.append(...groups.map((group, index) => samplesRow(group, index, axis, band(index))), samplesTicks(axis));
  if (detectable != null) element.append(h("p", { class: "muted" }, samplesAbout(detectable)));
  if (note) element.append(h("p", { class: "muted" }, note));
  element.append(tableBehind("The steps as a table", samplesTable(section)));
});

function samplesAbout(detectable) {
  const share = format.percent(detectable);
  return `A change to a median inside the shaded band, within ${share} of the one before, would be seen in less `
    + "than 80 % of cases.";
}

function samplesTable({ id, groups }) {
  const columns = tableColumns({ Recording: "text", Step: "count", Length: "ns", "Length, ns": "count" });
  const rows = groups.flatMap(({ name, every, lengths_ns: lengths }) =>
    lengths.map((ns, index) => [name, index * every + 1, ns, ns]));
  return { id, caption: "Lengths of the steps", columns, rows };
}

/** The range of the axis with a margin, and the share of the width at a length. */
function samplesAxis(lengths) {
  const low = lengths.reduce((one, other) => Math.min(one, other));
  const high = lengths.reduce((one, other) => Math.max(one, other));
  const margin = 0.06 * (high - low) || 0.05 * high || 1;
  const start = Math.max(low - margin, 0);
  const end = high + margin;
  return { start, end, at: (ns) => (ns - start) / (end - start) };
}

const samplesPercent = (share) => `${(100 * share).toFixed(3)}%`;

/** The medians that so few steps may not tell from the one before. */
function samplesBand({ median_ns: median }, detectable, { at }) {
  const inside = (share) => Math.min(Math.max(share, 0), 1);
  const [left, right] = [1 - detectable, 1 + detectable].map((factor) => inside(at(median * factor)));
  const [x, width] = [left, right - left].map(samplesPercent);
  return svg("rect", { class: "band", x, width, height: "100%" });
}

function samplesRow(group, index, axis, band) {
  const { name, steps, median_ns: median, lengths_ns: lengths } = group;
  const { dots, height } = samplesDots(lengths, axis);
  const x = samplesPercent(axis.at(median));
  const label = `${name}: ${format.count(steps)} ${steps === 1 ? "step" : "steps"}, median ${format.ns(median)}`;
  const picture = svg("svg", {
    role: "img", "aria-label": `${label}; all lengths are in the table below`, class: `dots side-${index}`, height,
    onmousemove: (event) => samplesHover(event, group), onmouseleave: tooltip.hide,
  }, band, dots, svg("line", { class: "median", x1: x, x2: x, y1: 2, y2: height - 2 }));
  return h("div", {}, h("p", { class: "label" }, label), picture);
}

/** A dot for each length; those of one place are stacked from the middle, up and down in turn. */
function samplesDots(lengths, { at }) {
  const stacks = new Map();
  const levels = lengths.map((ns) => {
    const column = Math.round(at(ns) * SAMPLES_COLUMNS);
    const level = stacks.get(column) ?? 0;
    stacks.set(column, level + 1);
    return level;
  });
  const tallest = Math.max(...stacks.values());
  const pitch = Math.min(SAMPLES_PITCH, SAMPLES_MOST / tallest);
  const height = Math.ceil(tallest * pitch + 24);
  const place = (level) => height / 2 + (level % 2 ? 1 : -1) * Math.ceil(level / 2) * pitch;
  const dot = (ns, index) =>
    svg("circle", { cx: samplesPercent(at(ns)), cy: place(levels[index]), r: 3.5, "data-at": index });
  return { dots: lengths.map(dot), height };
}

function samplesHover(event, { name, lengths_ns: lengths, every }) {
  const { at } = event.target.dataset;
  if (at === undefined) return tooltip.hide();
  const step = [`${name}, step ${Number(at) * every + 1}`, format.ns(lengths[at])];
  return tooltip.show(event.clientX, event.clientY, [step, `${format.count(lengths[at])} ns`]);
}

/** Three to six round lengths below the rows. */
function samplesTicks({ start, end, at }) {
  const rough = (end - start) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const [size, unit] = [[1e9, "s"], [1e6, "ms"], [1e3, "us"]].find(([ns]) => end >= ns) ?? [1, "ns"];
  const digits = Math.max(0, -Math.floor(Math.log10(step / size)));
  const ticks = [];
  for (let ns = Math.ceil(start / step) * step; ns <= end; ns += step) ticks.push(ns);
  const anchor = (share) => (share < 0.1 ? "start" : share > 0.9 ? "end" : "middle");
  const tick = (ns) => {
    const x = samplesPercent(at(ns));
    const words = `${(ns / size).toFixed(digits)} ${unit}`;
    const text = svg("text", { x, y: 19, "text-anchor": anchor(at(ns)) }, words);
    return [svg("line", { x1: x, x2: x, y1: 0, y2: 5 }), text];
  };
  const line = svg("line", { x1: 0, x2: "100%", y1: 0.5, y2: 0.5 });
  return svg("svg", { class: "axis", height: 24, "aria-hidden": "true" }, line, ticks.map(tick));
}
