// The timeline: zoom, pan, selection, and the tables behind the picture.

registerView("timeline", (section, element) => {
  const model = timelineModel(section);
  const view = { model, element, start: section.start_ns, end: section.end_ns, width: 0, selected: null, mark: null, palette: timelinePalette(model) };
  view.ruler = h("canvas", { role: "img", tabindex: "0", "aria-label": timelineLabel(section) });
  view.status = h("p", { role: "status", "aria-live": "polite", class: "timeline-status" }, "Select a slice to read its details.");
  element.append(timelineButtons(view), timelineLegend(section), view.status, h("div", { class: "timeline-ruler" }, view.ruler));
  view.groups = model.groups.map((group) => timelineGroup(view, group));
  if (section.notes.length) element.append(h("p", { class: "muted" }, section.notes.join(" ")));
  element.append(...timelineTables(view, section));
  timelineKeys(view);
  timelineStrip(view);
  state.onChange("t", (text) => timelineRestore(view, text));
  page.on("theme", () => { view.palette = timelinePalette(model); timelineDraw(view); });
  page.on("show", ({ start_ns: start, end_ns: end, label }) => timelineShow(view, start, end, label));
  new ResizeObserver(() => { view.width = element.clientWidth; timelineDraw(view); }).observe(element);
  timelineRestore(view, state.get("t"));
});

const TIMELINE_OPEN_ROWS = 48;
const TIMELINE_LEAST_NS = 50;

function timelineLabel({ steps, groups, end_ns: end, start_ns: start }) {
  const what = steps.length ? `${steps.length} ${steps.length === 1 ? "step" : "steps"}` : "the window";
  return `Timeline of ${what}, ${format.ns(end - start)}, with ${groups.length} groups of lanes: ${groups.map(({ title }) => title).join(", ")}. The tables below have its numbers.`;
}

function timelineButtons(view) {
  const button = (text, label, call) => h("button", { type: "button", "aria-label": label, title: label, onclick: call }, text);
  return h("div", { class: "actions" },
    button("+", "Zoom in", () => timelineZoom(view, 0.5)), button("−", "Zoom out", () => timelineZoom(view, 2)),
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
  const words = { input: "idle: input", synchronization: "idle: synchronization", overhead: "idle: overhead", latency: "idle: launch latency", other: "idle: other", runtime: "runtime call" };
  const entry = (name) => h("li", {}, h("span", { class: "swatch", style: { background: `var(--${name})` } }), words[name] ?? name);
  return h("ul", { class: "legend" }, classes.filter((_, kind) => used.has(kind)).map(entry));
}

function timelineGroup(view, group) {
  const rows = group.lanes.reduce((sum, { rows }) => sum + rows, 0);
  const before = group.lanes[0].first;
  const open = before === 0 || before + rows <= TIMELINE_OPEN_ROWS;
  group.canvas = h("canvas", { role: "img", "aria-label": `${group.title}: ${group.lanes.map(({ title }) => title).join(", ")}` });
  group.details = h("details", { open, class: "timeline-group", ontoggle: () => timelineDraw(view) }, h("summary", {}, group.title), group.canvas);
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
  const length = Math.min(Math.max(end - start, TIMELINE_LEAST_NS), last - first);
  view.start = Math.min(Math.max(start, first), last - length);
  view.end = view.start + length;
  tooltip.hide();
  timelineDraw(view);
  // Browsers allow few changes of the address per second.
  clearTimeout(view.saving);
  const whole = view.start === first && view.end === last;
  view.saving = setTimeout(() => state.set("t", whole ? null : `${Math.round(view.start)},${Math.round(view.end)}`), 200);
}

function timelineZoom(view, factor, at = 0.5) {
  const length = view.end - view.start, time = view.start + at * length;
  const next = Math.max(length * factor, TIMELINE_LEAST_NS);
  timelineMove(view, time - at * next, time + (1 - at) * next);
}

function timelinePan(view, part) {
  const by = part * (view.end - view.start);
  timelineMove(view, view.start + by, view.end + by);
}

function timelineRestore(view, text) {
  const [start, end] = (text ?? "").split(",").map(Number);
  if (end > start) timelineMove(view, start, end);
  else timelineMove(view, -Infinity, Infinity);
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

function timelineShow(view, start, end, label) {
  view.mark = { start, end };
  view.status.textContent = `Marked: ${label}, ${format.ns(end - start)} at ${timelineTickLabel(start, Math.max((end - start) / 10, 1))}.`;
  timelineAround(view, start, end);
  view.element.closest("section")?.scrollIntoView({ block: "start" });
}

/** Pairs of label and value for a slice. */
function timelineLines({ model }, slice) {
  const length = slice.end - slice.start, whole = model.end_ns - model.start_ns;
  const lines = [["length", format.ns(length)], ["start", timelineTickLabel(slice.start, Math.max(length / 10, 1))]];
  if (slice.merged) lines.push(["covered", format.percent(slice.covered / length)], ["mostly", model.classes[slice.kind]]);
  else lines.push(["class", model.classes[slice.kind]], ["share of the window", format.percent(length / whole)]);
  const idle = model.causes.has(slice.name);
  for (const [key, label] of slice.about ? timelineLinks(idle) : []) {
    const text = model.texts[model.launches[key][slice.about]];
    if (text) lines.push([label, text]);
  }
  return lines;
}

function timelineLinks(idle) {
  const links = [["call", "launched by"], ["operator", "operator"], ["region", "region"], ["module", "module"]];
  return idle ? [["work", "ended by"], ["call", "which was launched by"], ...links.slice(1)] : links;
}

function timelineName({ model }, slice) {
  if (slice.merged) return `${format.count(slice.slices)} slices, too short to show at this zoom`;
  const name = model.texts[slice.name];
  return model.causes.has(slice.name) ? `idle: ${name}` : name;
}

function timelineSelect(view, slice) {
  view.selected = slice;
  if (slice) {
    const lane = view.groups.flatMap((group) => group.lanes.map((lane) => ({ group, lane }))).find(({ lane }) => slice.row < lane.first + lane.rows);
    const cause = view.model.causes.get(slice.name);
    const lines = timelineLines(view, slice).map(([label, value]) => `${label} ${value}`);
    view.status.replaceChildren(h("b", {}, timelineName(view, slice)), ` in ${lane.group.title}, ${lane.lane.title}: ${lines.join(", ")}. ${cause ?? ""}`);
  }
  timelineDraw(view);
}

function timelineHover(view, group, event) {
  const slice = timelinePick(view, group, event);
  if (!slice) return tooltip.hide();
  const cause = view.model.causes.get(slice.name);
  return tooltip.show(event.clientX, event.clientY, [timelineName(view, slice), ...(cause ? [cause] : []), ...timelineLines(view, slice)]);
}

function timelinePick(view, group, event) {
  const { left, top } = group.canvas.getBoundingClientRect();
  const row = timelineRowAt(group, event.clientY - top);
  if (row == null) return null;
  const pixel = (view.end - view.start) / view.width;
  return timelineAt(view.model, timelineLevel(view.model, pixel), row, view.start + (event.clientX - left) * pixel, 3 * pixel);
}
