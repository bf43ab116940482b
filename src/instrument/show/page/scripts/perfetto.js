// Opens the trace in Perfetto, in another tab, and scrolls there. Perfetto takes a trace from a page that this
// machine serves, in a message, and answers PING with PONG once it listens. It sends nothing after that.

const PERFETTO_PING_MS = 50;
const PERFETTO_PATIENCE_MS = 15_000;
const PERFETTO_CLOSED = "The tab of Perfetto was closed before it had the trace. Click again to open it.";
const PERFETTO_SHARE = 0.6; // of the view's width, for the range that is shown

const perfetto = { opened: null, notice: h("div", { class: "notice", role: "status" }) };

page.on("data", ({ serve }) => {
  const lead = document.querySelector(".lead");
  if (serve.perfetto_reason) lead.after(h("p", { class: "muted" }, serve.perfetto_reason));
  if (!serve.perfetto) return;
  const { host } = new URL(serve.perfetto);
  const about = ` in a tab of ${host}, which gets the trace from this page and keeps it in the browser`;
  const button = h("button", { type: "button", onclick: () => perfettoShow() }, "Open in Perfetto");
  lead.after(h("p", { class: "actions" }, button, h("span", { class: "muted" }, about)));
  document.body.append(perfetto.notice);
  keys.add("p", "Open the trace in Perfetto", () => perfettoShow());
  page.on("perfetto", perfettoShow);
});

/** Show a range of the window, in ns, in the tab of Perfetto; without one, the trace. */
function perfettoShow(range) {
  const { opened } = perfetto;
  if (opened == null || opened.failed || opened.tab.closed) {
    perfettoOpen(range);
    return;
  }
  opened.range = range ?? opened.range;
  opened.tab.focus();
  if (opened.loaded) perfettoScroll(opened);
}

async function perfettoOpen(range) {
  perfetto.opened?.tab.close(); // one that failed
  const { serve } = page.data;
  const { origin, host } = new URL(serve.perfetto);
  const tab = window.open(perfettoAddress(range));
  if (tab == null) {
    perfetto.opened = null;
    perfettoNotice(
      `The browser blocked the tab for Perfetto. Allow pop-ups for ${location.host}, then click again.`,
    );
    return;
  }
  const opened = (perfetto.opened = { tab, range, loaded: false, failed: false });
  perfettoNotice(`Waiting for ${host}...`);
  try {
    const [buffer] = await Promise.all([perfettoTrace(), perfettoAnswer(tab)]);
    // Without keepApiOpen, Perfetto hears no later message.
    tab.postMessage({ perfetto: { buffer, title: serve.name, fileName: serve.name, keepApiOpen: true } }, origin, [
      buffer,
    ]);
    opened.loaded = true;
    perfettoScroll(opened);
    perfettoNotice("");
  } catch (error) {
    opened.failed = true;
    if (perfetto.opened === opened) perfettoNotice(error.message);
  }
}

/** Perfetto's own times, in ns: those of the file, which begins before the window. */
function perfettoTimes({ start_ns: start, end_ns: end }) {
  return [start, end].map((ns) => page.data.serve.start_ns + ns);
}

/** Perfetto waits 4 s for a trace to load before it scrolls; the address is for larger ones. */
function perfettoAddress(range) {
  const address = new URL(page.data.serve.perfetto);
  if (range) {
    const [start, end] = perfettoTimes(range).map(Math.round);
    address.hash = `!/?visStart=${start}&visEnd=${end}`;
  }
  return address.href;
}

function perfettoScroll({ tab, range }) {
  if (!range) return;
  const [timeStart, timeEnd] = perfettoTimes(range).map((ns) => ns / 1e9);
  tab.postMessage(
    { perfetto: { timeStart, timeEnd, viewPercentage: PERFETTO_SHARE } },
    new URL(page.data.serve.perfetto).origin,
  );
}

async function perfettoTrace() {
  const { serve } = page.data;
  const response = await fetch(serve.trace).catch(() => {
    throw new Error(
      "The trace cannot be read, because the command that served this page has ended. Start it again.",
    );
  });
  if (!response.ok) throw new Error(`${serve.name} can no longer be read.`);
  return response.arrayBuffer().catch(() => {
    const why = `The browser could not take ${serve.name}, which may be too large for it.`;
    throw new Error(`${why} Open the file in Perfetto by hand.`);
  });
}

function perfettoSilence() {
  const { host, href } = new URL(page.data.serve.perfetto);
  return `${host} did not answer within ${PERFETTO_PATIENCE_MS / 1e3} s. Check that this browser reaches ${href}, `
    + "then click again; the option --perfetto names another address. Everything else on this page works without "
    + "it.";
}

/** Wait until the tab answers. */
function perfettoAnswer(tab) {
  const { origin } = new URL(page.data.serve.perfetto);
  return new Promise((resolve, reject) => {
    const end = (settle, reason) => {
      clearInterval(timer);
      window.removeEventListener("message", listen);
      settle(reason && new Error(reason));
    };
    const listen = (event) => {
      if (event.source === tab && event.origin === origin && event.data === "PONG") end(resolve);
    };
    const last = performance.now() + PERFETTO_PATIENCE_MS;
    const timer = setInterval(() => {
      if (tab.closed) end(reject, PERFETTO_CLOSED);
      else if (performance.now() < last) tab.postMessage("PING", "*"); // the tab may not be there yet
      else end(reject, perfettoSilence());
    }, PERFETTO_PING_MS);
    window.addEventListener("message", listen);
  });
}

function perfettoNotice(text) {
  const close = h("button", { type: "button", onclick: () => perfettoNotice("") }, "Close");
  perfetto.notice.replaceChildren(...(text ? [h("span", {}, text), close] : []));
}
