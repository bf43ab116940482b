// Pointers and keys of the timeline, and the tables behind it.

/** What pointers and the wheel do to the shown time; places are in pixels from the left. */
function timelineActs(view) {
  return {
    pan: (by) => timelinePan(view, by / view.width),
    zoom: (factor, at) => timelineZoom(view, factor, at / view.width),
  };
}

function timelinePointer(view, group) {
  zoomByPointer(group.canvas, {
    ...timelineActs(view),
    hover: (event) => timelineHover(view, group, event),
    press: (event) => timelineSelect(view, timelinePick(view, group, event)),
    focus: () => view.ruler.focus({ preventScroll: true }),
  });
  zoomByWheel(group.canvas, timelineActs(view));
}

/** The strip above the ruler: a press or drag on it moves the view there. */
function timelineStrip(view) {
  const { ruler, model } = view;
  const go = (event) => {
    const { left, top } = ruler.getBoundingClientRect();
    if (!(event.buttons & 1) || (event.type === "pointerdown" && event.clientY - top > TIMELINE.strip)) return;
    const time = model.start_ns + ((event.clientX - left) / view.width) * (model.end_ns - model.start_ns);
    const half = (view.end - view.start) / 2;
    if (event.type === "pointerdown") ruler.setPointerCapture(event.pointerId);
    if (ruler.hasPointerCapture(event.pointerId)) timelineMove(view, time - half, time + half);
  };
  ruler.addEventListener("pointerdown", go);
  ruler.addEventListener("pointermove", go);
  zoomByWheel(ruler, timelineActs(view));
}

function timelineKeys(view) {
  const { element } = view;
  const focused = () => element.contains(document.activeElement);
  // Letters work while the timeline is on the screen and no other chart has the focus; arrows scroll elsewhere.
  const near = () => {
    const { top, bottom } = element.getBoundingClientRect();
    return focused() || (!document.activeElement.closest("svg, canvas") && bottom > 80 && top < innerHeight - 80);
  };
  const add = (key, words, call, active = near) => keys.add(key, words, () => active() && (call(), true));
  const [zoomIn, zoomOut] = [() => timelineZoom(view, 0.7), () => timelineZoom(view, 1 / 0.7)];
  const [left, right] = [() => timelinePan(view, -0.15), () => timelinePan(view, 0.15)];
  const whole = () => timelineMove(view, -Infinity, Infinity);
  add("w", "Timeline: zoom in", zoomIn);
  add("s", "Timeline: zoom out", zoomOut);
  add("a", "Timeline: to the left", left);
  add("d", "Timeline: to the right", right);
  add("+", "Timeline: zoom in", zoomIn);
  add("-", "Timeline: zoom out", zoomOut);
  add("0", "Timeline: the whole window", whole);
  add("f", "Timeline: fit the selection", () => timelineFit(view));
  add(".", "Timeline: select the next slice of the lane", () => timelineStepTo(view, 1));
  add(",", "Timeline: select the slice before", () => timelineStepTo(view, -1));
  add("Home", "Timeline, if it has the focus: the whole window", whole, focused);
  add("ArrowUp", "Timeline, if it has the focus: zoom in", zoomIn, focused);
  add("ArrowDown", "Timeline, if it has the focus: zoom out", zoomOut, focused);
  add("ArrowLeft", "Timeline, if it has the focus: to the left", left, focused);
  add("ArrowRight", "Timeline, if it has the focus: to the right", right, focused);
}

/** Select the slice before or after the selected one, or the first that is shown, and keep it in sight. */
function timelineStepTo(view, by) {
  const level = timelineLevel(view.model, (view.end - view.start) / view.width);
  const from = view.selected ?? { row: 0, start: view.start - 1 };
  const next = timelineNeighbor(view.model, level, from, by);
  if (!next) return;
  timelineSelect(view, next);
  const half = (view.end - view.start) / 2;
  const middle = (next.start + next.end) / 2;
  if (next.end < view.start || next.start > view.end) timelineMove(view, middle - half, middle + half);
}

/** The tables behind the timeline; a click on a row marks its place. */
function timelineTables(view, { steps, gaps, longest }) {
  const known = steps.some((row) => row[3] != null);
  const parts = { Compute: "ns", "Exposed communication": "ns", "Exposed memcpys": "ns", Idle: "ns" };
  const ofSteps = { Step: "count", Start: "ns", Length: "ns", ...(known ? parts : {}) };
  const ofGaps = { Cause: "text", Length: "ns", Start: "ns", "What ends it": "text" };
  const ofSlices = { Slice: "text", Lane: "text", Length: "ns", Start: "ns" };
  return [
    timelineTable("The steps as a table", "timeline-steps", "Steps", ofSteps, steps,
      ([number, start, length]) => [`step-${number}`, start, length, `step ${number}`]),
    timelineTable("The longest idle gaps as a table", "timeline-gaps", "Longest idle gaps", ofGaps, gaps,
      ([cause, length, start], at) => [`gap-${at + 1}`, start, length, `idle: ${cause}`]),
    timelineTable("The longest slices of each lane as a table", "timeline-slices", "Longest slices of each lane",
      ofSlices, longest, ([name, , length, start], at) => [`slice-${at + 1}`, start, length, name]),
  ].filter(Boolean);
}

function timelineTable(summary, id, caption, columns, rows, placeOf) {
  if (!rows.length) return null;
  const names = new Map(rows.map((row, at) => {
    const [name, start, length, label] = placeOf(row, at);
    places.set(name, { start_ns: start, end_ns: start + length, label });
    return [row, name];
  }));
  const onRow = (row) => page.emit("show", names.get(row));
  return tableBehind(summary, { id, caption, columns: tableColumns(columns), rows, onRow });
}
