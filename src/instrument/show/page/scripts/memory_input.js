// Pointers, the wheel and keys of the memory over time.

const MEMORY_STEP = 4; // pixels: how far a key moves the selected point at least

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
