// The slices of the timeline as typed arrays: which level serves a zoom, and what lies at a time.

/** Sum up gaps and lengths to starts and ends; the slices of row r are first[r] to first[r + 1]. */
function timelineColumns(columns) {
  const count = columns.gap.length;
  const first = new Uint32Array(columns.rows.length + 1);
  const start = new Float64Array(count);
  const end = new Float64Array(count);
  columns.rows.forEach((rows, row) => {
    first[row + 1] = first[row] + rows;
    for (let at = first[row], time = 0; at < first[row + 1]; at++) {
      start[at] = time + columns.gap[at];
      time = end[at] = start[at] + columns.length[at];
    }
  });
  return { ...columns, first, start, end };
}

function timelineModel(section) {
  const levels = section.levels.map((level) => ({
    resolution: level.resolution_ns,
    single: timelineColumns(level.single),
    merged: timelineColumns(level.merged),
  }));
  let row = 0;
  const groups = section.groups.map(({ title, lanes }) => ({
    title,
    lanes: lanes.map(([name, rows]) => ({ title: name, first: row, rows: ((row += rows), rows) })),
  }));
  return { ...section, levels, groups, causes: new Map(section.causes) };
}

/** The first slice of a row that ends after a time. */
function timelineAfter({ first, end }, row, time) {
  let [low, high] = [first[row], first[row + 1]];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (end[middle] > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** The coarsest level that shows each slice of a pixel or more by itself. */
function timelineLevel({ levels }, pixelNs) {
  const found = levels.findIndex(({ resolution }) => resolution <= pixelNs);
  return found < 0 ? levels.length - 1 : found;
}

/** What a level shows: columns of slices, whether these are merged, and in which parts finer ones replace them. */
function timelineSources({ levels, whole, detailed }, level) {
  const sources = levels.slice(0, level + 1).map(({ single }) => ({ columns: single, merged: false, except: [] }));
  if (level >= whole) sources.push({ columns: levels[whole - 1].merged, merged: true, except: detailed });
  sources.push({ columns: levels[level].merged, merged: true, except: [] });
  return sources;
}

function timelineHides({ columns, except }, at) {
  return except.some(([start, end]) => columns.start[at] >= start && columns.start[at] < end);
}

/** Call a function with the columns and the place of each slice of a row between two times. */
function timelineEach(sources, row, start, end, call) {
  for (const source of sources) {
    const { columns, merged } = source;
    const last = columns.first[row + 1];
    for (let at = timelineAfter(columns, row, start); at < last && columns.start[at] < end; at++) {
      if (!timelineHides(source, at)) call(columns, at, merged);
    }
  }
}

function timelineSlice(model, row, columns, at, merged) {
  const count = model.classes.length;
  const slice = { row, start: columns.start[at], end: columns.end[at], merged };
  if (merged)
    return { ...slice, kind: columns.kind[at], slices: columns.slices[at], covered: columns.covered[at] };
  return {
    ...slice,
    kind: columns.name[at] % count,
    name: Math.floor(columns.name[at] / count),
    about: columns.about[at],
  };
}

/** The slice of a row that is closest to a time, less than `near` away. */
function timelineAt(model, level, row, time, near) {
  let [best, least] = [null, near];
  timelineEach(timelineSources(model, level), row, time - near, time + near, (columns, at, merged) => {
    const away = Math.max(columns.start[at] - time, time - columns.end[at], 0);
    if (away < least || (away === 0 && !best)) {
      least = away;
      best = timelineSlice(model, row, columns, at, merged);
    }
  });
  return best;
}

/** The slice before (-1) or after (1) another slice of its row. */
function timelineNeighbor(model, level, { row, start }, by) {
  let best = null;
  for (const source of timelineSources(model, level)) {
    const { columns, merged } = source;
    const [first, last] = [columns.first[row], columns.first[row + 1]];
    let at = timelineAfter(columns, row, start);
    if (by < 0) at -= 1;
    while (at >= first && at < last && (by * (columns.start[at] - start) <= 0 || timelineHides(source, at)))
      at += by;
    if (at < first || at >= last) continue;
    if (!best || by * (best.start - columns.start[at]) > 0) best = timelineSlice(model, row, columns, at, merged);
  }
  return best;
}
