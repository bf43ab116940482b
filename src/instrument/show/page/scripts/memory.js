// The memory in use over time by category, what was reserved, and the peak: zoom, pan, and a selected point.

const MEMORY_LEAST = { time: 10_000, event: 8 }; // ns, events: the length of the shortest range
const MEMORY_TABLE = 100; // stretches

registerView("memory", (section, element) => {
  const model = memoryModel(section);
  const view = { section, model, element, width: 0, selected: model.peak };
  const axes = model.time ? [["time", "By time"], ["event", "By event"]] : [["event", "By event"]];
  view.canvas = h("canvas", { role: "img", tabindex: "0", "aria-label": memoryLabel(view) });
  view.status = h("p", { role: "status", "aria-live": "polite", class: "timeline-status" });
  view.axes = axes.map(([axis, words]) =>
    h("button", { type: "button", "data-axis": axis, onclick: () => memoryChoose(view, axis) }, words));
  element.append(memoryButtons(view), memoryLegend(view), view.canvas, view.status);
  element.append(...section.notes.map((note) => h("p", { class: "muted" }, note)), memoryTable(view));
  memoryInput(view);
  for (const key of ["axis", "range", "point"]) state.onChange(`${section.id}.${key}`, () => memoryRestore(view));
  page.on("theme", () => memoryDraw(view));
  new ResizeObserver(() => {
    view.width = element.clientWidth;
    memoryDraw(view);
  }).observe(element);
  memoryRestore(view);
});

/** The numbers of each point from the changes between points, and the upper ends of the stacked areas. */
function memoryModel(section) {
  const sums = (changes) => {
    let sum = 0;
    return Float64Array.from(changes, (change) => (sum += change));
  };
  const bytes = section.bytes.map(sums);
  const stacked = [];
  for (const own of bytes) stacked.push(own.map((value, at) => value + (stacked.at(-1)?.[at] ?? 0)));
  return {
    event: sums(section.event), time: section.time_ns && sums(section.time_ns), bytes, stacked,
    used: stacked.at(-1), reserved: section.reserved_bytes && sums(section.reserved_bytes), peak: section.peak,
  };
}

function memoryLabel({ section, model }) {
  const { used, event, peak } = model;
  return `${section.title}: ${format.count(event.length)} points, ${format.bytes(used[peak])} in use at the peak. `
    + "The table below has its numbers.";
}

function memoryButtons(view) {
  const button = (text, label, call) =>
    h("button", { type: "button", "aria-label": label, title: label, onclick: call }, text);
  return h("div", { class: "controls" },
    view.axes.length > 1 ? h("span", { role: "group", "aria-label": "Axis" }, view.axes) : null,
    button("+", "Zoom in", () => memoryZoom(view, 0.5)),
    button("−", "Zoom out", () => memoryZoom(view, 2)),
    button("Whole", "Show all events", () => memoryMove(view, -Infinity, Infinity)),
    button("Peak", "Select the peak", () => memorySelect(view, view.model.peak)),
    h("span", { class: "muted timeline-hint" }, "Ctrl + wheel zooms, drag pans, a click selects a point."));
}

function memoryLegend({ section, model }) {
  const areas = section.categories.map((name) => [`var(--${name})`, classWords(name)]);
  const reserved = model.reserved ? [["var(--text)", "reserved (line)"]] : [];
  return legend([...areas, ...reserved]);
}

/** The index of the first point after a place of the axis. */
function memoryAfter(places, place) {
  let [low, high] = [0, places.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (places[middle] > place) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** The points that tell a range in so many columns: the highest, the lowest and the last one of each column. */
function memoryShown({ places, model: { used } }, start, end, columns) {
  const last = memoryAfter(places, end);
  const shown = [];
  for (let at = Math.max(memoryAfter(places, start) - 1, 0); at < last; ) {
    const column = Math.floor(((places[at] - start) / (end - start)) * columns);
    const border = start + ((column + 1) / columns) * (end - start);
    let [next, high, low] = [at, at, at];
    for (; next < last && (next === at || places[next] < border); next += 1) {
      if (used[next] > used[high]) high = next;
      if (used[next] < used[low]) low = next;
    }
    shown.push(...new Set([high, low, next - 1].toSorted((one, other) => one - other)));
    at = next;
  }
  return shown;
}

/** Show what the address says: the axis, the range and the selected point. */
function memoryRestore(view) {
  const kept = (key) => state.get(`${view.section.id}.${key}`);
  const { time, event, peak } = view.model;
  view.axis = time && kept("axis") !== "event" ? "time" : "event";
  view.places = view.model[view.axis];
  view.axes.forEach((each) => each.setAttribute("aria-pressed", String(each.dataset.axis === view.axis)));
  const [start, end] = (kept("range") ?? "").split(",").map(Number);
  const point = kept("point") == null ? peak : event.indexOf(Number(kept("point")));
  memorySelect(view, point < 0 ? peak : point);
  if (end > start) memoryMove(view, start, end);
  else memoryMove(view, -Infinity, Infinity);
}

function memoryChoose(view, axis) {
  state.set(`${view.section.id}.axis`, axis === "event" ? axis : null);
  state.set(`${view.section.id}.range`, null);
  memoryRestore(view);
}

/** The ends of the axis. */
function memoryBounds({ places }) {
  return [places[0], Math.max(places.at(-1), places[0] + 1)];
}

/** Show a range of the axis. */
function memoryMove(view, start, end) {
  const bounds = memoryBounds(view);
  [view.start, view.end] = zoomWithin([start, end], bounds, MEMORY_LEAST[view.axis]);
  tooltip.hide();
  memoryDraw(view);
  const whole = view.start === bounds[0] && view.end === bounds[1];
  state.set(`${view.section.id}.range`, whole ? null : `${Math.round(view.start)},${Math.round(view.end)}`);
}

/** Zoom around a part of the range, by default around the selected point if it is shown. */
function memoryZoom(view, factor, at) {
  const own = (view.places[view.selected] - view.start) / (view.end - view.start);
  const part = at ?? (own >= 0 && own <= 1 ? own : 0.5);
  memoryMove(view, ...zoomAround([view.start, view.end], factor, part, MEMORY_LEAST[view.axis]));
}

function memoryPan(view, part) {
  const by = part * (view.end - view.start);
  memoryMove(view, view.start + by, view.end + by);
}

/** Select a point, and keep it in sight. */
function memorySelect(view, point) {
  const { model, places, section } = view;
  view.selected = point;
  state.set(`${section.id}.point`, point === model.peak ? null : model.event[point]);
  const [place, ...lines] = memoryLines(view, point);
  const words = lines.map(([label, value]) => `${label} ${value}`).join(", ");
  view.status.textContent = `${point === model.peak ? "The peak, " : ""}${place}: ${words}.`;
  const half = (view.end - view.start) / 2;
  if (places[point] < view.start || places[point] > view.end)
    memoryMove(view, places[point] - half, places[point] + half);
  else memoryDraw(view);
}

/** Where a point is, and pairs of label and value: what was in use, in all and by category. */
function memoryLines({ section, model }, point) {
  const { event, time, used, bytes, reserved } = model;
  const number = event[point] < 0 ? "before the first event" : `after event ${format.count(event[point] + 1)}`;
  const sizes = section.categories.map((name, row) => [classWords(name), bytes[row][point]]);
  return [
    time && event[point] >= 0 ? `${number}, ${format.ns(time[point])} after the first` : number,
    ["in use", format.bytes(used[point])],
    ...sizes.filter(([, size]) => size).map(([name, size]) => [name, format.bytes(size)]),
    ...(reserved ? [["reserved", format.bytes(reserved[point])]] : []),
  ];
}

/** The point at a distance from the left: the highest one there, or else the last one before. */
function memoryAt({ places, model, width, start, end }, x) {
  const pixel = (end - start) / memoryWidth(width);
  const place = start + (x - MEMORY.left) * pixel;
  let found = Math.max(memoryAfter(places, place) - 1, 0);
  const after = memoryAfter(places, place + pixel);
  for (let at = memoryAfter(places, place - pixel); at < after; at += 1)
    if (model.used[at] > model.used[found]) found = at;
  return found;
}

function memoryTable(view) {
  const { section, model } = view;
  const places = { ...view, places: model.event };
  const shown = memoryShown(places, ...memoryBounds(places), MEMORY_TABLE);
  const columns = [
    ["After event", "count", model.event.map((event) => event + 1)],
    ["After the first", "ns", model.time],
    ["In use", "bytes", model.used],
    ...model.bytes.map((values, row) => [classWords(section.categories[row]), "bytes", values]),
    ["Reserved", "bytes", model.reserved],
  ].filter(([, , values]) => values);
  const rows = shown.map((at) => columns.map(([, , values]) => values[at]));
  return tableBehind("The memory over time as a table", {
    id: section.id, caption: `${section.title}: the highest and lowest points of ${MEMORY_TABLE} stretches`,
    columns: columns.map(([title, kind]) => ({ title, kind })), rows,
  });
}
