// What zooms and pans: a range of an axis, and the pointers and the wheel on a picture of it.

/** A range as part of an axis from first to last, and no shorter than "least". */
function zoomWithin([start, end], [first, last], least) {
  const length = Math.min(Math.max(end - start, least), last - first);
  const from = Math.min(Math.max(start, first), last - length);
  return [from, from + length];
}

/** A range that is longer by a factor, around a part of it: 0 is its start, 1 its end. */
function zoomAround([start, end], factor, part, least) {
  const place = start + part * (end - start);
  const length = Math.max((end - start) * factor, least);
  return [place - part * length, place + (1 - part) * length];
}

/**
 * A drag calls "pan" with a distance, two fingers "zoom" with a factor and a place, a press without a drag calls
 * "press", and a move without a button "hover"; "focus" comes first. Places are pixels from the left.
 */
function zoomByPointer(element, { pan, zoom, hover, press, focus }) {
  const down = new Map();
  let [moved, spread] = [0, 0];
  element.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    if (!down.size) moved = 0;
    down.set(event.pointerId, event.clientX);
    element.setPointerCapture(event.pointerId);
    focus();
    spread = zoomSpread(down);
  });
  element.addEventListener("pointermove", (event) => {
    if (!down.has(event.pointerId)) return void hover(event);
    const by = event.clientX - down.get(event.pointerId);
    down.set(event.pointerId, event.clientX);
    moved += Math.abs(by);
    if (down.size === 1 && moved > 3) pan(-by);
    else if (down.size === 2) {
      const [before, middle] = [spread, [...down.values()].reduce((sum, x) => sum + x, 0) / 2];
      spread = zoomSpread(down);
      zoom(before / spread, middle - element.getBoundingClientRect().left);
    }
  });
  const up = (event) => {
    if (!down.delete(event.pointerId)) return;
    if (event.type === "pointerup" && moved <= 3) press(event);
  };
  element.addEventListener("pointerup", up);
  element.addEventListener("pointercancel", up);
  element.addEventListener("pointerleave", () => tooltip.hide());
}

function zoomSpread(down) {
  const places = [...down.values()];
  return Math.max(Math.max(...places) - Math.min(...places), 20);
}

/** Ctrl zooms at the pointer, shift and sideways pan; else the wheel scrolls the page. */
function zoomByWheel(element, { pan, zoom }) {
  element.addEventListener(
    "wheel",
    (event) => {
      const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
      if (!event.ctrlKey && !event.metaKey && !event.shiftKey && !sideways) return;
      event.preventDefault();
      const by = (sideways ? event.deltaX : event.deltaY) * (event.deltaMode ? 20 : 1);
      const { left } = element.getBoundingClientRect();
      if (event.ctrlKey || event.metaKey) zoom(1.003 ** by, event.clientX - left);
      else pan(by);
    },
    { passive: false },
  );
}
