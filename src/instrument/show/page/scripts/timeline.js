// The timeline: zoom, pan, selection, and the tables behind the picture.

const TIMELINE_OPEN_ROWS = 48;
const TIMELINE_LEAST_NS = 50;

registerView("timeline", (section, element) => {
  const model = timelineModel(section);
  const view = { model, element, width: 0, selected: null, mark: null, palette: timelinePalette(model) };
  view.ruler = h("canvas", { role: "img", tabindex: "0", "aria-label": timelineLabel(section) });
  view.status = h("p", { role: "status", "aria-live": "polite", class: "timeline-status" });
  element.append(timelineButtons(view), timelineLegend(section), view.status);
  element.append(h("div", { class: "timeline-ruler" }, view.ruler));
  view.groups = model.groups.map((group, index) => timelineGroup(view, group, `lanes-${index + 1}`));
  if (section.notes.length) element.append(h("p", { class: "muted" }, section.notes.join(" ")));
  element.append(...timelineTables(view, section));
  timelineKeys(view);
  timelineStrip(view);
  for (const key of ["t", "mark", "slice"]) state.onChange(key, () => timelineRestore(view));
  page.on("theme", () => {
    view.palette = timelinePalette(model);
    timelineDraw(view);
  });
  page.on("show", (name) => timelineShow(view, name));
  new ResizeObserver(() => {
    view.width = element.clientWidth;
    timelineDraw(view);
  }).observe(element);
  timelineRestore(view);
  page.on("ready", () => view.mark && timelineScroll(view));
});

function timelineLabel({ steps, groups, end_ns: end, start_ns: start }) {
  const what = steps.length ? `${steps.length} ${steps.length === 1 ? "step" : "steps"}` : "the window";
  const titles = groups.map(({ title }) => title).join(", ");
  return `Timeline of ${what}, ${format.ns(end - start)}, with ${groups.length} groups of lanes: ${titles}. `
    + "The tables below have its numbers.";
}

function timelineButtons(view) {
  const button = (text, label, call) =>
    h("button", { type: "button", "aria-label": label, title: label, onclick: call }, text);
  return h("div", { class: "actions" },
    button("+", "Zoom in", () => timelineZoom(view, 0.5)),
    button("−", "Zoom out", () => timelineZoom(view, 2)),
    button("Whole", "Show the whole window", () => timelineMove(view, -Infinity, Infinity)),
    button("Fit", "Fit the selection", () => timelineFit(view)),
    h("span", { class: "muted timeline-hint" }, "Ctrl + wheel zooms, drag pans; w a s d as in Perfetto."));
}

function timelineLegend({ classes, levels }) {
  const used = new Set();
  for (const { single, merged } of levels) {
    for (const name of single.name) used.add(name % classes.length);
    for (const kind of merged.kind) used.add(kind);
  }
  const shown = classes.filter((_, kind) => used.has(kind));
  return legend(shown.map((name) => [`var(--${name})`, classWords(name)]));
}

function timelineGroup(view, group, id) {
  const rows = group.lanes.reduce((sum, { rows }) => sum + rows, 0);
  const before = group.lanes[0].first;
  const open = before === 0 || before + rows <= TIMELINE_OPEN_ROWS;
  const label = `${group.title}: ${group.lanes.map(({ title }) => title).join(", ")}`;
  group.canvas = h("canvas", { role: "img", "aria-label": label });
  const attributes = { open, class: "timeline-group", ontoggle: () => timelineDraw(view) };
  group.details = disclosure(id, group.title, group.canvas, attributes);
  view.element.append(group.details);
  timelinePointer(view, group);
  return group;
}

/** Draw in the next frame, once for all calls before it. */
function timelineDraw(view) {
  if (view.frame) return;
  view.frame = requestAnimationFrame(() => {
    view.frame = 0;
    if (!view.width) return;
    timelineDrawRuler(view);
    view.groups.filter(({ details }) => details.open).forEach((group) => timelineDrawGroup(view, group));
  });
}

/** Show a time, within the window. */
function timelineMove(view, start, end) {
  const { start_ns: first, end_ns: last } = view.model;
  [view.start, view.end] = zoomWithin([start, end], [first, last], TIMELINE_LEAST_NS);
  tooltip.hide();
  timelineDraw(view);
  const whole = view.start === first && view.end === last;
  state.set("t", whole ? null : `${Math.round(view.start)},${Math.round(view.end)}`);
}

function timelineZoom(view, factor, at = 0.5) {
  timelineMove(view, ...zoomAround([view.start, view.end], factor, at, TIMELINE_LEAST_NS));
}

function timelinePan(view, part) {
  const by = part * (view.end - view.start);
  timelineMove(view, view.start + by, view.end + by);
}

/** Show what the address says: the marked place, the selected slice, and the time. */
function timelineRestore(view) {
  const [text, mark] = [state.get("t"), places.get(state.get("mark"))];
  const [start, end] = (text ?? "").split(",").map(Number);
  const slice = timelineKept(view, state.get("slice"));
  view.mark = null;
  if (mark) timelineMark(view, mark);
  if (slice || !mark) timelineSelect(view, slice);
  if (end > start) timelineMove(view, start, end);
  else if (mark) timelineAround(view, mark.start_ns, mark.end_ns);
  else timelineMove(view, -Infinity, Infinity);
}

/** The slice that begins at a time in a row, "3,1200"; null if there is none. */
function timelineKept({ model }, text) {
  const [row, start] = (text ?? "").split(",").map(Number);
  let kept = null;
  timelineEach(timelineSources(model, model.levels.length - 1), row, start, start + 1, (columns, at, merged) => {
    if (!merged && columns.start[at] === start) kept = timelineSlice(model, row, columns, at, merged);
  });
  return kept;
}

/** Show a time with a margin. */
function timelineAround(view, start, end) {
  const margin = Math.max((end - start) * 0.25, TIMELINE_LEAST_NS);
  timelineMove(view, start - margin, end + margin);
}

function timelineFit(view) {
  const place = view.selected ?? view.mark;
  if (place) timelineAround(view, place.start, place.end);
}

/** Mark a place, and show it with what is around it. */
function timelineShow(view, name) {
  const place = places.get(name);
  state.set("mark", name);
  timelineMark(view, place);
  timelineAround(view, place.start_ns, place.end_ns);
  timelineScroll(view);
}

function timelineScroll({ element }) {
  element.closest("section").scrollIntoView({ block: "start" });
}

function timelineMark(view, { start_ns: start, end_ns: end, label }) {
  const time = timelineTickLabel(start, Math.max((end - start) / 10, 1));
  timelineSelect(view, null);
  view.mark = { start, end };
  view.status.textContent = `Marked: ${label}, ${format.ns(end - start)} at ${time}.`;
}

/** Pairs of label and value for a slice. */
function timelineLines({ model }, slice) {
  const length = slice.end - slice.start;
  const whole = model.end_ns - model.start_ns;
  const lines = [
    ["length", format.ns(length)],
    ["start", timelineTickLabel(slice.start, Math.max(length / 10, 1))],
  ];
  const kind = classWords(model.classes[slice.kind]);
  if (slice.merged) lines.push(["covered", format.percent(slice.covered / length)], ["mostly", kind]);
  else lines.push(["class", kind], ["share of the window", format.percent(length / whole)]);
  const idle = model.causes.has(slice.name);
  for (const [key, label] of slice.about ? timelineLinks(idle) : []) {
    const text = model.texts[model.launches[key][slice.about]];
    if (text) lines.push([label, text]);
  }
  return lines;
}

function timelineLinks(idle) {
  const calls = idle ? [["work", "ended by"], ["call", "which was launched by"]] : [["call", "launched by"]];
  return [...calls, ["operator", "operator"], ["region", "region"], ["module", "module"]];
}

function timelineName({ model }, slice) {
  if (slice.merged) return `${format.count(slice.slices)} slices, too short to show at this zoom`;
  const name = model.texts[slice.name];
  return model.causes.has(slice.name) ? `idle: ${name}` : name;
}

/** Select a slice, or none; the address keeps one that all zooms show. */
function timelineSelect(view, slice) {
  view.selected = slice;
  state.set("slice", slice && !slice.merged ? `${slice.row},${slice.start}` : null);
  if (slice) view.status.replaceChildren(...timelineAbout(view, slice));
  else view.status.textContent = "Select a slice to read its details.";
  timelineDraw(view);
}

function timelineAbout(view, slice) {
  const below = ({ first, rows }) => slice.row < first + rows;
  const group = view.groups.find(({ lanes }) => below(lanes.at(-1)));
  const lines = timelineLines(view, slice).map(([label, value]) => `${label} ${value}`);
  const cause = view.model.causes.get(slice.name) ?? "";
  const place = `${group.title}, ${group.lanes.find(below).title}`;
  return [h("b", {}, timelineName(view, slice)), ` in ${place}: ${lines.join(", ")}. ${cause}`];
}

function timelineHover(view, group, event) {
  const slice = timelinePick(view, group, event);
  if (!slice) return tooltip.hide();
  const cause = view.model.causes.get(slice.name);
  const lines = [timelineName(view, slice), ...(cause ? [cause] : []), ...timelineLines(view, slice)];
  return tooltip.show(event.clientX, event.clientY, lines);
}

function timelinePick({ model, start, end, width }, group, event) {
  const { left, top } = group.canvas.getBoundingClientRect();
  const row = timelineRowAt(group, event.clientY - top);
  if (row == null) return null;
  const pixel = (end - start) / width;
  return timelineAt(model, timelineLevel(model, pixel), row, start + (event.clientX - left) * pixel, 3 * pixel);
}
