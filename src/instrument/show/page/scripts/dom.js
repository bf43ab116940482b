// Builders of elements, formats of numbers, colors. Texts become text nodes: nothing of a trace is parsed as HTML.

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child != null && child !== ""));
  return element;
}

/** An HTML element; "on..." attributes are functions, "style" is an object. */
function h(tag, attributes, ...children) {
  return build(document.createElement(tag), attributes, children);
}

/** An SVG element. */
function svg(tag, attributes, ...children) {
  return build(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

const CLASS_WORDS = {
  input: "idle: input", synchronization: "idle: synchronization", overhead: "idle: overhead",
  latency: "idle: launch latency", other: "idle: other", runtime: "runtime call", copies: "memcpy",
  optimizer_state: "optimizer state", other_memory: "other",
};

/** What people call a class of slices or nodes. */
const classWords = (name) => CLASS_WORDS[name] ?? name;

/** A text of at most so many characters. */
const cutTo = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/** A paragraph that begins with what it is about. */
function labelled(label, ...children) {
  return h("p", {}, h("span", { class: "muted" }, `${label}: `), children);
}

/** A small area of a color, before a name. */
function swatch(background) {
  return h("span", { class: "swatch", style: { background } });
}

/** What the colors of a picture stand for; entries are pairs of a CSS color and words. */
function legend(entries) {
  const entry = ([background, words]) => h("li", {}, swatch(background), words);
  return h("ul", { class: "legend" }, entries.map(entry));
}

// Made once: toLocaleString makes one for each number, which takes longer than the rest of a picture.
const [FORMAT_DECIMALS, FORMAT_DIGITS] = [{ maximumFractionDigits: 1 }, { maximumSignificantDigits: 4 }].map(
  (digits) => new Intl.NumberFormat("en-US", digits),
);

const FORMAT_TIMES = [[1, "ns"], [1e3, "us"], [1e6, "ms"], [1e9, "s"]];
const FORMAT_SIZES = [[1, "B"], [1e3, "kB"], [1e6, "MB"], [1e9, "GB"], [1e12, "TB"]];

/** A number with three digits in the fitting one of the units; in the smallest one it is whole. */
function formatThree(n, units) {
  const [size, unit] = units.find(([size]) => Math.abs(n) < 999.5 * size) ?? units.at(-1);
  const value = Math.abs(n) / size;
  const digits = size === 1 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return `${n < 0 ? "-" : ""}${value.toFixed(digits)} ${unit}`;
}

const format = {
  /** A duration: "1.20 ms". */
  ns(ns) {
    if (ns == null) return "";
    return ns ? formatThree(ns, FORMAT_TIMES) : "0";
  },
  count(n) {
    return n == null ? "" : FORMAT_DECIMALS.format(n);
  },
  percent(share) {
    return share == null ? "" : `${(100 * share).toFixed(1)} %`;
  },
  /** A size, as the terminal shows it: "13.8 GB". */
  bytes(n) {
    return n == null ? "" : formatThree(n, FORMAT_SIZES);
  },
  number(n) {
    return n == null ? "" : FORMAT_DIGITS.format(n);
  },
  text(text) {
    return text ?? "";
  },
  long(text) {
    return text ?? "";
  },
};

/** The color of a class of time, "compute" and so on, in the current theme. */
function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
