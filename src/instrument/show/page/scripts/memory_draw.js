// Draws the memory over time: stacked areas, axes, the line of what was reserved, the peak and the selected point.

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
  const { section, model, width, start, end } = view;
  const palette = Object.fromEntries(
    ["text", "muted", "line", "background", ...section.categories].map((name) => [name, color(name)]),
  );
  const context = timelineContext(view.canvas, width, MEMORY.height, palette.background);
  const low = MEMORY.height - MEMORY.bottom;
  const scale = {
    x: (place) => MEMORY.left + ((place - start) / (end - start)) * memoryWidth(width),
    y: (bytes) => low - (bytes / (section.top_bytes || 1)) * (low - MEMORY.top),
  };
  memoryGrid(view, context, palette, scale);
  const shown = memoryShown(view, start, end, memoryWidth(width));
  model.stacked.toReversed().forEach((values, above) => {
    memoryTrace(view, context, scale, shown, values);
    context.lineTo(width, low);
    context.lineTo(MEMORY.left, low);
    context.fillStyle = palette[section.categories.at(-1 - above)];
    context.fill();
  });
  context.lineWidth = 1.5;
  context.strokeStyle = palette.text;
  if (model.reserved) {
    memoryTrace(view, context, scale, shown, model.reserved);
    context.stroke();
  }
  memoryMarks(view, context, palette, scale);
}

/** Begin a path along values, each of which holds until the next point. */
function memoryTrace({ places, width }, context, { x, y }, shown, values) {
  let height = y(values[shown[0]]);
  context.beginPath();
  for (const at of shown) {
    const left = Math.max(x(places[at]), MEMORY.left);
    context.lineTo(left, height);
    height = y(values[at]);
    context.lineTo(left, height);
  }
  context.lineTo(width, height);
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
function memoryMarks({ model, places, selected, width, start, end }, context, palette, { x }) {
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
  if (selected !== model.peak) mark(selected, []);
  if (!mark(model.peak, [4, 3])) return;
  const words = `peak ${format.bytes(model.used[model.peak])}`;
  const left = x(places[model.peak]);
  context.textAlign = left > width / 2 ? "right" : "left";
  context.fillStyle = palette.text;
  context.fillText(words, left + (left > width / 2 ? -4 : 4), MEMORY.top / 2);
  context.textAlign = "left";
}
