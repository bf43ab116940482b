// Draws the timeline: a ruler with the steps, and a canvas with the lanes of each group.

const TIMELINE = {
  row: 16,
  caption: 15,
  gap: 5,
  ruler: 58,
  strip: 12,
  font: "11px system-ui, 'DejaVu Sans', sans-serif",
};

/** The colors of the theme, and for each class that of its text: black or white, whichever has more contrast. */
function timelinePalette({ classes }) {
  const names = ["text", "muted", "line", "background", "mark", "panel", "accent"];
  const luminance = (hex) =>
    [1, 3, 5]
      .map((at) => parseInt(hex.slice(at, at + 2), 16))
      .reduce((sum, part, at) => sum + part * [0.3, 0.59, 0.11][at], 0);
  const fills = classes.map(color);
  return {
    ...Object.fromEntries(names.map((name) => [name, color(name)])),
    fills,
    texts: fills.map((fill) => (luminance(fill) > 140 ? "#000" : "#fff")),
  };
}

/** Size a canvas to its place and return its cleared context, in CSS pixels. */
function timelineContext(canvas, width, height, background) {
  const ratio = window.devicePixelRatio || 1;
  const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d", { alpha: false });
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.fillStyle = background;
  context.fillRect(0, 0, width, height);
  context.font = TIMELINE.font;
  context.textBaseline = "middle";
  return context;
}

function timelineGroupHeight({ lanes }) {
  return lanes.reduce((sum, { rows }) => sum + TIMELINE.caption + rows * TIMELINE.row + TIMELINE.gap, 0);
}

/** The row of the model at a height of a group's canvas; null between rows. */
function timelineRowAt({ lanes }, y) {
  let top = 0;
  for (const { first, rows } of lanes) {
    top += TIMELINE.caption;
    if (y >= top && y < top + rows * TIMELINE.row) return first + Math.floor((y - top) / TIMELINE.row);
    top += rows * TIMELINE.row + TIMELINE.gap;
  }
  return null;
}

function timelineDrawGroup(view, group) {
  const { palette, model, width } = view;
  const height = timelineGroupHeight(group);
  const context = timelineContext(group.canvas, width, height, palette.background);
  const brackets = timelineDrawMark(view, context, 0, height);
  const sources = timelineSources(model, timelineLevel(model, (view.end - view.start) / width));
  let top = 0;
  for (const lane of group.lanes) {
    context.fillStyle = palette.muted;
    context.fillText(lane.title, 2, top + TIMELINE.caption / 2);
    top += TIMELINE.caption;
    for (let row = lane.first; row < lane.first + lane.rows; row++, top += TIMELINE.row)
      timelineDrawRow(view, context, sources, row, top);
    top += TIMELINE.gap;
  }
  brackets();
}

function timelineDrawRow(view, context, sources, row, top) {
  const { model, palette, width, start, end } = view;
  const scale = width / (end - start);
  const count = model.classes.length;
  const labels = [];
  timelineEach(sources, row, start, end, (columns, at, merged) => {
    const left = Math.max((columns.start[at] - start) * scale, -2);
    const right = Math.min((columns.end[at] - start) * scale, width + 2);
    const kind = merged ? columns.kind[at] : columns.name[at] % count;
    context.fillStyle = palette.fills[kind];
    context.globalAlpha = merged ? 0.3 + (0.6 * columns.covered[at]) / (columns.end[at] - columns.start[at]) : 1;
    // A gap of half a pixel tells neighbors apart where there is room for it.
    const shown = Math.max(right - left - (right - left > 3 ? 0.5 : 0), 0.7);
    context.fillRect(left, top, shown, TIMELINE.row - 1);
    if (right - left < 26) return;
    const text = merged ? `${columns.slices[at]} slices` : model.texts[Math.floor(columns.name[at] / count)];
    labels.push({ left: Math.max(left, 0), right: Math.min(right, width), style: palette.texts[kind], text });
  });
  context.globalAlpha = 1;
  for (const { left, right, style, text } of labels) {
    timelineDrawText(context, text, left + 3, top + TIMELINE.row / 2, right - left - 6, style);
  }
  if (view.selected?.row === row) timelineDrawFrame(view, context, top);
}

/** A frame around the selected slice. */
function timelineDrawFrame({ selected, palette, width, start, end }, context, top) {
  const scale = width / (end - start);
  const shown = Math.max((selected.end - selected.start) * scale, 2);
  context.strokeStyle = palette.text;
  context.lineWidth = 2;
  context.strokeRect((selected.start - start) * scale, top + 1, shown, TIMELINE.row - 3);
}

function timelineDrawText(context, text, x, y, room, style) {
  const most = Math.floor(room / 6);
  if (most < 2) return;
  context.fillStyle = style;
  context.fillText(cutTo(text, most), x, y, room);
}

/** Shade the marked place; the function returned draws its brackets above what is drawn in between. */
function timelineDrawMark({ mark, palette, width, start, end }, context, top, height) {
  if (!mark) return () => {};
  const scale = width / (end - start);
  const left = (mark.start - start) * scale;
  const right = Math.max((mark.end - start) * scale, left + 2);
  context.fillStyle = palette.mark;
  context.globalAlpha = 0.15;
  context.fillRect(left, top, right - left, height - top);
  context.globalAlpha = 1;
  return () => {
    context.fillStyle = palette.mark;
    context.fillRect(left - 2, top, 2, height - top);
    context.fillRect(right, top, 2, height - top);
  };
}

/** A distance between ticks that is 1, 2 or 5 times a power of ten, and leaves room for their labels. */
function timelineTick(span, width) {
  const least = (span / width) * 90;
  const power = 10 ** Math.floor(Math.log10(least));
  return Math.max(
    [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least),
    1,
  );
}

function timelineDrawRuler(view) {
  const { palette, width, start, end, model } = view;
  const context = timelineContext(view.ruler, width, TIMELINE.ruler, palette.background);
  timelineDrawStrip(view, context);
  const brackets = timelineDrawMark(view, context, TIMELINE.strip, TIMELINE.ruler);
  const scale = width / (end - start);
  const tick = timelineTick(end - start, width);
  context.fillStyle = palette.muted;
  for (let time = Math.ceil(start / tick) * tick; time <= end; time += tick) {
    const x = (time - start) * scale;
    context.fillRect(x, TIMELINE.strip + 4, 1, 6);
    context.fillText(timelineTickLabel(time, tick), x + 3, TIMELINE.strip + 12, width - x - 3);
  }
  timelineDrawSteps(view, context, TIMELINE.strip + 24);
  brackets();
}

/** A band for each step with its number and its length; without steps, one for the window. */
function timelineDrawSteps({ palette, width, start, end, model }, context, top) {
  const scale = width / (end - start);
  const window_ = [null, model.start_ns, model.end_ns - model.start_ns];
  const bands = model.steps.length ? model.steps : [window_];
  bands.forEach(([number, from, length], at) => {
    const left = Math.max((from - start) * scale, 0);
    const right = Math.min((from + length - start) * scale, width);
    if (right <= left) return;
    context.fillStyle = palette.line;
    context.globalAlpha = at % 2 ? 0.6 : 1;
    context.fillRect(left, top, Math.max(right - left - 1, 0.7), TIMELINE.row);
    context.globalAlpha = 1;
    const text = `${number == null ? "window" : `step ${number}`} · ${format.ns(length)}`;
    timelineDrawText(context, text, left + 4, top + TIMELINE.row / 2 + 0.5, right - left - 8, palette.text);
  });
}

/** A time with as many digits as tell it from the next tick: "145.07 ms". */
function timelineTickLabel(time, tick) {
  if (!time) return "0";
  const [size, unit] = [
    [1e9, "s"],
    [1e6, "ms"],
    [1e3, "us"],
  ].find(([size]) => Math.abs(time) >= size) ?? [1, "ns"];
  const digits = Math.max(0, Math.ceil(Math.log10(size / tick)));
  return `${(time / size).toFixed(digits)} ${unit}`;
}

/** The whole window with its steps, and the part of it that the timeline shows. */
function timelineDrawStrip({ palette, width, start, end, model }, context) {
  const whole = model.end_ns - model.start_ns;
  const scale = width / whole;
  context.fillStyle = palette.line;
  context.fillRect(0, 0, width, TIMELINE.strip);
  context.fillStyle = palette.background;
  model.steps.forEach(([, from]) => context.fillRect((from - model.start_ns) * scale, 0, 1, TIMELINE.strip));
  context.fillStyle = palette.accent;
  context.globalAlpha = 0.45;
  context.fillRect((start - model.start_ns) * scale, 0, Math.max((end - start) * scale, 3), TIMELINE.strip);
  context.globalAlpha = 1;
}
