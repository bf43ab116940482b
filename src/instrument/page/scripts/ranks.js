// The ranks of a job: a strip of all ranks for each time, and a row of bars for each of those at the top of the chosen order.

const RANKS_ROWS = 32; // ranks with bars of their own
const RANKS_TIMES = [
  ["step", "Step", "muted"], ["compute", "Computes", "compute"], ["waited", "Waits for others", "communication"], ["caused", "Makes others wait", "synchronization"],
];
const RANKS_ORDERS = [["rank", "Rank"], ["caused", "Makes others wait"], ["waited", "Waits for others"], ["step", "Step"], ["compute", "Computes"], ["last", "Arrives last"]];

registerView("ranks", (section, element) => {
  const { ranks } = section;
  const picture = h("div"), most = ranksMost(ranks);
  const choose = h("select", { "aria-label": "Order of the ranks", onchange: () => { state.set("order", choose.value); draw(); } },
    RANKS_ORDERS.map(([value, words]) => h("option", { value }, words)));
  const draw = () => {
    choose.value = RANKS_ORDERS.find(([value]) => value === state.get("order"))?.[0] ?? (ranks.length > RANKS_ROWS ? "caused" : "rank");
    const order = choose.value, sorted = ranks.toSorted((one, other) => (order === "rank" ? 0 : other[order] - one[order]) || one.rank - other.rank);
    const strips = ranks.length > RANKS_ROWS ? RANKS_TIMES.map((time) => ranksStrip(section, sorted, most, time)) : [];
    const hidden = ranks.length > RANKS_ROWS ? h("p", { class: "muted" }, `The first ${RANKS_ROWS} of ${format.count(ranks.length)} ranks in this order`) : null;
    picture.replaceChildren(...strips, hidden ?? "", ranksHead(), ...sorted.slice(0, RANKS_ROWS).map((rank) => ranksRow(section, rank, most)));
  };
  element.append(
    h("p", { class: "muted" }, `${section.notes.join(" ")} Times are ${section.each}; "makes others wait" adds up all others.`),
    h("div", { class: "controls" }, h("label", {}, "Order: ", choose)), picture,
    behind("The ranks as a table", dataTable(ranksTable(section))),
  );
  draw();
  state.onChange("order", draw);
});

/** The largest of each time, which fills the width of its column. */
function ranksMost(ranks) {
  return Object.fromEntries(RANKS_TIMES.map(([key]) => [key, Math.max(...ranks.map((rank) => rank[key]), 1)]));
}

function ranksLines({ each, compared }, rank) {
  return [`Rank ${rank.rank}`, ...RANKS_TIMES.map(([key, words]) => [words, `${format.ns(rank[key])} ${each}`]), ["Arrives last", `${format.count(rank.last)} of ${format.count(compared)} times`]];
}

/** All ranks as cells, the shortest time pale, the longest in full color. */
function ranksStrip(section, sorted, most, [key, words, kind]) {
  const low = Math.min(...sorted.map((rank) => rank[key])), shade = (ns) => 0.1 + 0.9 * ((ns - low) / (most[key] - low || 1));
  const cells = sorted.map((rank, index) => svg("rect", { x: index, y: 0, width: 1, height: 1, fill: `var(--${kind})`, "fill-opacity": shade(rank[key]) }));
  const show = (event) => {
    const { left, width } = event.currentTarget.getBoundingClientRect();
    const rank = sorted[Math.min(Math.max(Math.floor(((event.clientX - left) / width) * sorted.length), 0), sorted.length - 1)];
    tooltip.show(event.clientX, event.clientY, ranksLines(section, rank));
  };
  const [least, largest] = [low, most[key]].map(format.ns);
  return h("div", { class: "rank-strip" }, h("div", {}, `${words} `, h("span", { class: "muted" }, `${least} to ${largest}`)),
    svg("svg", { viewBox: `0 0 ${sorted.length} 1`, preserveAspectRatio: "none", "shape-rendering": "crispEdges", role: "img", "aria-label": `${words}: ${least} to ${largest} on ${sorted.length} ranks`, onmousemove: show, onmouseleave: tooltip.hide }, cells));
}

function ranksHead() {
  return h("div", { class: "rank head" }, h("span"), RANKS_TIMES.map(([, words]) => h("span", {}, words)), h("span", {}, "Last"));
}

function ranksRow(section, rank, most) {
  const bar = ([key, , kind]) => h("span", { class: "rank-value" },
    h("span", { class: "rank-bar", style: { width: `${(100 * rank[key]) / most[key]}%`, background: `color-mix(in srgb, var(--${kind}) 40%, transparent)` } }),
    h("span", {}, format.ns(rank[key])));
  return h("div", {
    class: `rank${rank.rank === section.shown ? " shown" : ""}`,
    onmousemove: (event) => tooltip.show(event.clientX, event.clientY, ranksLines(section, rank)), onmouseleave: tooltip.hide,
  }, h("span", {}, `rank ${rank.rank}${rank.rank === section.shown ? " (shown)" : ""}`), RANKS_TIMES.map(bar), h("span", {}, format.count(rank.last)));
}

function ranksTable({ ranks, each }) {
  const columns = [{ title: "Rank", kind: "count" }, ...RANKS_TIMES.map(([, words]) => ({ title: `${words} ${each}`, kind: "ns" })), { title: "Arrives last", kind: "count" }];
  return { caption: "The ranks", columns, rows: ranks.map((rank) => [rank.rank, ...RANKS_TIMES.map(([key]) => rank[key]), rank.last]) };
}
