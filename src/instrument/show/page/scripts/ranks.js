// The ranks of a job: of many, a strip of all ranks for each time; bars for each of the first in the chosen order.

const RANKS_ROWS = 32; // ranks with bars of their own
const RANKS_TIMES = [
  ["step", "Step", "muted"],
  ["compute", "Computes", "compute"],
  ["waited", "Waits for others", "communication"],
  ["caused", "Makes others wait", "synchronization"],
];
const RANKS_ORDERS = [
  ["rank", "Rank"],
  ["caused", "Makes others wait"],
  ["waited", "Waits for others"],
  ["step", "Step"],
  ["compute", "Computes"],
  ["last", "Arrives last"],
];

registerView("ranks", (section, element) => {
  const usual = section.ranks.length > RANKS_ROWS ? "caused" : "rank";
  const picture = h("div");
  const choose = h("select", { "aria-label": "Order of the ranks" },
    RANKS_ORDERS.map(([value, words]) => h("option", { value }, words)));
  const draw = () => {
    choose.value = RANKS_ORDERS.find(([value]) => value === state.get("order"))?.[0] ?? usual;
    picture.replaceChildren(...ranksPicture(section, choose.value));
  };
  choose.addEventListener("change", () => {
    state.set("order", choose.value === usual ? null : choose.value);
    draw();
  });
  const about = `${section.notes.join(" ")} Times are ${section.each}; "makes others wait" adds up all others.`;
  const controls = h("div", { class: "controls" }, h("label", {}, "Order: ", choose));
  element.append(h("p", { class: "muted" }, about), controls, picture);
  element.append(tableBehind("The ranks as a table", ranksTable(section)));
  draw();
  state.onChange("order", draw);
});

/** The strips and the rows of bars in an order; those of equal values are in order of the rank. */
function ranksPicture(section, order) {
  const { ranks } = section;
  const value = (rank) => (order === "rank" ? 0 : rank[order]);
  const sorted = ranks.toSorted((one, other) => value(other) - value(one) || one.rank - other.rank);
  const most = ranksMost(ranks);
  const rows = [ranksHead(), ...sorted.slice(0, RANKS_ROWS).map((rank) => ranksRow(section, rank, most))];
  if (ranks.length <= RANKS_ROWS) return rows;
  const strips = RANKS_TIMES.map((time) => ranksStrip(section, sorted, most, time));
  const note = `The first ${RANKS_ROWS} of ${format.count(ranks.length)} ranks in this order`;
  return [...strips, h("p", { class: "muted" }, note), ...rows];
}

/** The largest of each time, which fills the width of its column. */
function ranksMost(ranks) {
  return Object.fromEntries(RANKS_TIMES.map(([key]) => [key, Math.max(...ranks.map((rank) => rank[key]), 1)]));
}

function ranksLines({ each, compared }, rank) {
  return [
    `Rank ${rank.rank}`,
    ...RANKS_TIMES.map(([key, words]) => [words, `${format.ns(rank[key])} ${each}`]),
    ["Arrives last", `${format.count(rank.last)} of ${format.count(compared)} times`],
  ];
}

/** All ranks as cells, the shortest time pale, the longest in full color. */
function ranksStrip(section, sorted, most, [key, words, kind]) {
  const low = Math.min(...sorted.map((rank) => rank[key]));
  const shade = (ns) => 0.1 + 0.9 * ((ns - low) / (most[key] - low || 1));
  const cell = (rank, x) => svg("rect", { x, y: 0, width: 1, height: 1, "fill-opacity": shade(rank[key]) });
  const show = (event) => {
    const { left, width } = event.currentTarget.getBoundingClientRect();
    const at = Math.floor(((event.clientX - left) / width) * sorted.length);
    const rank = sorted[Math.min(Math.max(at, 0), sorted.length - 1)];
    tooltip.show(event.clientX, event.clientY, ranksLines(section, rank));
  };
  const range = `${format.ns(low)} to ${format.ns(most[key])}`;
  const picture = svg("svg", {
    viewBox: `0 0 ${sorted.length} 1`, preserveAspectRatio: "none", "shape-rendering": "crispEdges",
    fill: `var(--${kind})`, role: "img", "aria-label": `${words}: ${range} on ${sorted.length} ranks`,
    onmousemove: show, onmouseleave: tooltip.hide,
  }, sorted.map(cell));
  const title = h("div", {}, `${words} `, h("span", { class: "muted" }, range));
  return h("div", { class: "rank-strip" }, title, picture);
}

function ranksHead() {
  const titles = RANKS_TIMES.map(([, words]) => h("span", {}, words));
  return h("div", { class: "rank head" }, h("span"), titles, h("span", {}, "Last"));
}

function ranksRow(section, rank, most) {
  const shown = rank.rank === section.shown;
  const bar = ([key, , kind]) => {
    const background = `color-mix(in srgb, var(--${kind}) 40%, transparent)`;
    const style = { width: `${(100 * rank[key]) / most[key]}%`, background };
    const number = h("span", {}, format.ns(rank[key]));
    return h("span", { class: "rank-value" }, h("span", { class: "rank-bar", style }), number);
  };
  return h("div", {
    class: `rank${shown ? " shown" : ""}`,
    onmousemove: (event) => tooltip.show(event.clientX, event.clientY, ranksLines(section, rank)),
    onmouseleave: tooltip.hide,
  }, h("span", {}, `rank ${rank.rank}${shown ? " (shown)" : ""}`), RANKS_TIMES.map(bar),
  h("span", {}, format.count(rank.last)));
}

function ranksTable({ id, ranks, each }) {
  const times = RANKS_TIMES.map(([, words]) => ({ title: `${words} ${each}`, kind: "ns" }));
  const columns = [{ title: "Rank", kind: "count" }, ...times, { title: "Arrives last", kind: "count" }];
  const rows = ranks.map((rank) => [rank.rank, ...RANKS_TIMES.map(([key]) => rank[key]), rank.last]);
  return { id, caption: "The ranks", columns, rows };
}
