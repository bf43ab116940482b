// What all views share: the state in the URL's hash, events, the keyboard, the tooltip, the theme.

const views = new Map();

/** Register the function that draws sections of a type. */
function registerView(type, render) {
  views.set(type, render);
}

const STATE_PAUSE_MS = 400; // browsers refuse frequent changes of the address: Safari more than 100 in 30 s

/** What the URL's hash says of the view: a text for each key that is not as usual. A text may be anything. */
const state = (() => {
  const listeners = new Map();
  const read = () => new Map(new URLSearchParams(location.hash.slice(1)));
  let values = read();
  let [written, waiting] = [-STATE_PAUSE_MS, false];
  // A page inside a notebook has no address of its own.
  const shared = location.protocol !== "about:" && location.protocol !== "data:";
  const write = () => {
    [written, waiting] = [performance.now(), false];
    const text = String(new URLSearchParams([...values]));
    history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
  };
  window.addEventListener("hashchange", () => {
    const before = values;
    values = read();
    for (const [key, calls] of listeners) {
      if (before.get(key) !== values.get(key)) calls.forEach((call) => call(values.get(key)));
    }
  });
  return {
    /** The text of a key; undefined while the view is as usual. */
    get: (key) => values.get(key),
    /** Keep a text in the address; null or "" for what is usual. */
    set(key, text) {
      const next = text == null || text === "" ? undefined : String(text);
      if (next === values.get(key)) return;
      if (next == null) values.delete(key);
      else values.set(key, next);
      if (!shared || waiting) return;
      waiting = true;
      const pause = written + STATE_PAUSE_MS - performance.now();
      if (pause > 0) setTimeout(write, pause);
      else queueMicrotask(write);
    },
    /** Call a function when the address changes under the page, as after "back". */
    onChange(key, call) {
      listeners.set(key, [...(listeners.get(key) ?? []), call]);
    },
  };
})();

const page = (() => {
  const listeners = new Map();
  return {
    data: null,
    on(event, call) {
      listeners.set(event, [...(listeners.get(event) ?? []), call]);
    },
    emit(event, detail) {
      (listeners.get(event) ?? []).forEach((call) => call(detail));
    },
  };
})();
window.addEventListener("resize", () => page.emit("resize"));

/** Places in the timeline by their names in the address, "finding-2": {start_ns, end_ns, label}. */
const places = new Map();

const keys = (() => {
  const known = new Map();
  const typing = (target) =>
    target instanceof Element && target.closest("input, select, textarea, dialog") != null;
  window.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || typing(event.target)) return;
    if (known.get(event.key)?.some(({ call }) => call(event) !== false)) event.preventDefault();
  });
  return {
    /** Call a function for a key. If it returns false, the key is not for it, and the next function is called. */
    add(key, words, call) {
      known.set(key, [...(known.get(key) ?? []), { words, call }]);
    },
    list: () => [...known].flatMap(([key, calls]) => calls.map(({ words }) => [key, words])),
  };
})();

const tooltip = (() => {
  const element = document.getElementById("tooltip");
  return {
    /** Show lines, each a text or a pair of label and value, beside a point of the window. */
    show(x, y, lines) {
      element.replaceChildren(
        ...lines.map((line) => (Array.isArray(line) ? labelled(line[0], String(line[1])) : h("p", {}, line))),
      );
      element.hidden = false;
      const { width, height } = element.getBoundingClientRect();
      element.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 4))}px`;
      element.style.top = `${Math.max(4, y + 18 + height > innerHeight ? y - height - 10 : y + 18)}px`;
    },
    hide() {
      element.hidden = true;
    },
  };
})();

const theme = (() => {
  const preferred = matchMedia("(prefers-color-scheme: dark)");
  const usual = () => (preferred.matches ? "dark" : "light");
  const current = () => ["dark", "light"].find((name) => name === state.get("theme")) ?? usual();
  const apply = () => {
    document.documentElement.dataset.theme = current();
    page.emit("theme");
  };
  preferred.addEventListener("change", apply);
  state.onChange("theme", apply);
  apply();
  const toggle = () => {
    const next = current() === "dark" ? "light" : "dark";
    state.set("theme", next === usual() ? null : next);
    apply();
  };
  document.getElementById("theme").addEventListener("click", toggle);
  return { toggle };
})();
