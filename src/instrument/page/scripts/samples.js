// The lengths of steps as dots on one axis, a row for each recording, with the median marked.

const SAMPLES_PITCH = 7, SAMPLES_COLUMNS = 160, SAMPLES_MOST = 150;

registerView("samples", (section, element) => {
  const { groups, detectable, note } = section;
  const axis = samplesAxis(groups.flatMap(({ lengths_ns: lengths }) => lengths));
  element.append(...groups.map((group, index) => samplesRow(group, index, axis, index ? samplesBand(groups[0], detectable, axis) : null)));
  element.append(samplesTicks(axis));
  if (detectable != null) {
    element.append(h("p", { class: "muted" }, `A change to a median inside the shaded band, within ${format.percent(detectable)} of the one before, would be seen in less than 80 % of cases.`));
  }
  if (note) element.append(h("p", { class: "muted" }, note));
  const columns = [{ title: "Recording", kind: "text" }, { title: "Step", kind: "count" }, { title: "Length", kind: "ns" }, { title: "Length, ns", kind: "count" }];
  const rows = groups.flatMap(({ name, every, lengths_ns: lengths }) => lengths.map((ns, index) => [name, index * every + 1, ns, ns]));
  element.append(behind("The steps as a table", dataTable({ caption: "Lengths of the steps", columns, rows })));
});

/** The range of the axis with a margin, and the share of the width at a length. */
function samplesAxis(lengths) {
  const low = lengths.reduce((one, other) => Math.min(one, other)), high = lengths.reduce((one, other) => Math.max(one, other));
  const margin = 0.06 * (high - low) || 0.05 * high || 1;
  const start = Math.max(low - margin, 0), end = high + margin;
  return { start, end, at: (ns) => (ns - start) / (end - start) };
}

const samplesPercent = (share) => `${(100 * share).toFixed(3)}%`;

/** The medians that so few steps may not tell from the one before. */
function samplesBand({ median_ns: median }, detectable, { at }) {
  if (detectable == null) return null;
  const [left, right] = [1 - detectable, 1 + detectable].map((factor) => Math.min(Math.max(at(median * factor), 0), 1));
  return svg("rect", { class: "band", x: samplesPercent(left), width: samplesPercent(right - left), height: "100%" });
}

function samplesRow(group, index, axis, band) {
  const { name, steps, median_ns: median, lengths_ns: lengths, every } = group;
  const stacks = new Map();
  const places = lengths.map((ns) => {
    const column = Math.round(axis.at(ns) * SAMPLES_COLUMNS), level = stacks.get(column) ?? 0;
    stacks.set(column, level + 1);
    return level;
  });
  const tallest = Math.max(...stacks.values()), pitch = Math.min(SAMPLES_PITCH, SAMPLES_MOST / tallest);
  const height = Math.ceil(tallest * pitch + 24), middle = height / 2;
  // Dots of one column are stacked from the middle, up and down in turn.
  const dots = lengths.map((ns, at) => svg("circle", {
    cx: samplesPercent(axis.at(ns)), cy: middle + (places[at] % 2 ? 1 : -1) * Math.ceil(places[at] / 2) * pitch, r: 3.5, "data-at": at,
  }));
  const label = `${name}: ${format.count(steps)} ${steps === 1 ? "step" : "steps"}, median ${format.ns(median)}`;
  const picture = svg("svg", { role: "img", "aria-label": `${label}; all lengths are in the table below`, class: `dots side-${index}`, height },
    band,
    dots,
    svg("line", { class: "median", x1: samplesPercent(axis.at(median)), x2: samplesPercent(axis.at(median)), y1: 2, y2: height - 2 }));
  picture.addEventListener("mousemove", (event) => {
    const at = event.target.dataset.at;
    if (at === undefined) tooltip.hide();
    else tooltip.show(event.clientX, event.clientY, [[`${name}, step ${Number(at) * every + 1}`, format.ns(lengths[at])], `${format.count(lengths[at])} ns`]);
  });
  picture.addEventListener("mouseleave", tooltip.hide);
  return h("div", {}, h("p", { class: "label" }, label), picture);
}

/** Three to six round lengths below the rows. */
function samplesTicks({ start, end, at }) {
  const rough = (end - start) / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const [size, unit] = [[1e9, "s"], [1e6, "ms"], [1e3, "us"]].find(([ns]) => end >= ns) ?? [1, "ns"];
  const digits = Math.max(0, -Math.floor(Math.log10(step / size)));
  const ticks = [];
  for (let ns = Math.ceil(start / step) * step; ns <= end; ns += step) ticks.push(ns);
  const anchor = (share) => (share < 0.1 ? "start" : share > 0.9 ? "end" : "middle");
  return svg("svg", { class: "axis", height: 24, "aria-hidden": "true" },
    svg("line", { x1: 0, x2: "100%", y1: 0.5, y2: 0.5 }),
    ticks.map((ns) => [
      svg("line", { x1: samplesPercent(at(ns)), x2: samplesPercent(at(ns)), y1: 0, y2: 5 }),
      svg("text", { x: samplesPercent(at(ns)), y: 19, "text-anchor": anchor(at(ns)) }, `${(ns / size).toFixed(digits)} ${unit}`),
    ]));
}
