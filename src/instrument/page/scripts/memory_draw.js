// Draws the memory over time, and takes its pointers and keys.

const MEMORY = {
  height: 300, // pixels
  left: 62, // of the axis of bytes
  top: 16,
  bottom: 18,
};

const memoryWidth = (width) => Math.max(width - MEMORY.left, 1);

/** Draw in the next frame, once for all calls before it. */
function memoryDraw(view) {
  if (view.frame) return;
  view.frame = requestAnimationFrame(() => {
    view.frame = 0;
    if (view.width) memoryPicture(view);
  });
}

function memoryPicture(view) {
  const { canvas, section, model, places, width, start, end } = view;
  const palette = Object.fromEntries(
    ["text", "muted", "line", "background", ...section.categories].map((name) => [name, color(name)]),
  );
  const context = timelineContext(canvas, width, MEMORY.height, palette.background);
  const low = MEMORY.height - MEMORY.bottom;
  const scale = {
    x: (place) => MEMORY.left + ((place - start) / (end - start)) * memoryWidth(width),
    y: (bytes) => low - (bytes / (section.top_bytes || 1)) * (low - MEMORY.top),
  };
  const shown = memoryShown(view, start, end, memoryWidth(width));
  const trace = (values) => {
    const points = shown.map((at) => [Math.max(scale.x(places[at]), MEMORY.left), scale.y(values[at])]);
    context.beginPath();
    points.forEach(([x, y], at) => {
      context.lineTo(x, at ? points[at - 1][1] : y);
      context.lineTo(x, y);
    });
    context.lineTo(width, points.at(-1)[1]);
  };
  memoryGrid(view, context, palette, scale);
  model.stacked.toReversed().forEach((values, above) => {
    trace(values);
    context.lineTo(width, low);
    context.lineTo(MEMORY.left, low);
    context.fillStyle = palette[section.categories.at(-1 - above)];
    context.fill();
  });
  context.lineWidth = 1.5;
  context.strokeStyle = palette.text;
  if (model.reserved) {
    trace(model.reserved);
    context.stroke();
  }
  memoryMarks(view, context, palette, scale);
}

/** The axes: lines at round sizes, and ticks at round times or events. */
function memoryGrid({ section, axis, width, start, end }, context, palette, { x, y }) {
  const high = memoryTick(section.top_bytes, 5);
  context.textAlign = "right";
  for (let bytes = 0; bytes <= section.top_bytes; bytes += high) {
    context.fillStyle = palette.line;
    context.fillRect(MEMORY.left, Math.round(y(bytes)), width - MEMORY.left, 1);
    context.fillStyle = palette.muted;
    context.fillText(format.bytes(bytes), MEMORY.left - 6, y(bytes));
  }
  context.textAlign = "left";
  const wide = timelineTick(end - start, memoryWidth(width));
  for (let place = Math.ceil(start / wide) * wide || 0; place <= end; place += wide) {
    context.fillStyle = palette.muted;
    context.fillRect(x(place), MEMORY.height - MEMORY.bottom, 1, 5);
    const words = axis === "time" ? timelineTickLabel(place, wide) : `event ${format.count(place)}`;
    if (x(place) + 3 + context.measureText(words).width <= width)
      context.fillText(words, x(place) + 3, MEMORY.height - MEMORY.bottom / 2);
  }
}

/** A distance between at most so many ticks of an axis that begins at 0: 1, 2 or 5 times a power of ten. */
function memoryTick(most, ticks) {
  const least = Math.max(most, 1) / ticks;
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least);
}

/** The peak, with its size, and the selected point. */
function memoryMarks({ model, places, selected, width, start, end }, context, palette, { x, y }) {
  const mark = (at, dashes) => {
    if (places[at] < start || places[at] > end) return false;
    context.setLineDash(dashes);
    context.beginPath();
    context.moveTo(x(places[at]), MEMORY.top - 4);
    context.lineTo(x(places[at]), MEMORY.height - MEMORY.bottom);
    context.stroke();
    context.setLineDash([]);
    return true;
  };
  context.strokeStyle = palette.text;
  if (selected !== model.peak) mark(selected, []);
  if (!mark(model.peak, [4, 3])) return;
  const words = `peak ${format.bytes(model.used[model.peak])}`;
  const left = x(places[model.peak]);
  context.textAlign = left > width / 2 ? "right" : "left";
  context.fillStyle = palette.text;
  context.fillText(words, left + (left > width / 2 ? -4 : 4), MEMORY.top / 2);
  context.textAlign = "left";
}

/** Pointers, the wheel and keys. */
function memoryInput(view) {
  const { canvas } = view;
  const part = (x) => (x - MEMORY.left) / memoryWidth(view.width);
  const at = (event) => memoryAt(view, event.clientX - canvas.getBoundingClientRect().left);
  const acts = {
    pan: (by) => memoryPan(view, by / memoryWidth(view.width)),
    zoom: (factor, x) => memoryZoom(view, factor, Math.min(Math.max(part(x), 0), 1)),
  };
  zoomByWheel(canvas, acts);
  zoomByPointer(canvas, {
    ...acts,
    hover: (event) => tooltip.show(event.clientX, event.clientY, memoryLines(view, at(event))),
    press: (event) => memorySelect(view, at(event)),
    focus: () => canvas.focus({ preventScroll: true }),
  });
  const add = (key, words, call) =>
    keys.add(key, `${view.section.title}, if it has the focus: ${words}`, () =>
      document.activeElement === canvas && (call(), true));
  add("ArrowLeft", "select a point to the left", () => memoryStep(view, -1));
  add("ArrowRight", "select a point to the right", () => memoryStep(view, 1));
  add("ArrowUp", "zoom in", () => memoryZoom(view, 0.7));
  add("ArrowDown", "zoom out", () => memoryZoom(view, 1 / 0.7));
  add("+", "zoom in", () => memoryZoom(view, 0.7));
  add("-", "zoom out", () => memoryZoom(view, 1 / 0.7));
  add("0", "show all events", () => memoryMove(view, -Infinity, Infinity));
  add("Home", "show all events", () => memoryMove(view, -Infinity, Infinity));
  add("p", "select the peak", () => memorySelect(view, view.model.peak));
}

/** Select the next point that is some pixels to the left or right. */
function memoryStep(view, by) {
  const { places, width, start, end, selected } = view;
  const least = (MEMORY_STEP * (end - start)) / memoryWidth(width);
  let at = selected + by;
  while (places[at + by] != null && Math.abs(places[at] - places[selected]) < least) at += by;
  if (places[at] != null) memorySelect(view, at);
}
