// The ranks of a job: one row of bars each, in an order that can be chosen; many ranks are thin rows.

const RANKS_BARS = [
  ["compute_ns", "compute", "computes"], ["waited_ns", "communication", "waits for other ranks"], ["caused_ns", "synchronization", "makes others wait"],
];

registerView("ranks", (section, element) => {
  const { ranks } = section;
  let order = "rank";
  const picture = h("div", { role: "img", "aria-label": ranksLabel(ranks) });
  const orders = [["rank", "Rank"], ["caused_ns", "Makes others wait"], ["waited_ns", "Waits"], ["window_ns", "Length"]];
  const choose = h("select", { "aria-label": "Order of the ranks", onchange: () => { order = choose.value; draw(); } },
    orders.map(([value, words]) => h("option", { value }, words)));
  const draw = () => picture.replaceChildren(...ranksRows(section, order));
  element.append(
    ...section.notes.map((note) => h("p", { class: "muted" }, note)), ranksLegend(),
    h("div", { class: "controls" }, h("label", {}, "Order: ", choose)), picture,
    behind("The ranks as a table", dataTable(ranksTable(ranks))),
  );
  draw();
});

function ranksLabel(ranks) {
  const latest = ranks.reduce((one, other) => (other.caused_ns > one.caused_ns ? other : one));
  return `${ranks.length} ranks; the others wait ${format.ns(latest.caused_ns)} for rank ${latest.rank}`;
}

function ranksLegend() {
  return h("ul", { class: "legend" }, RANKS_BARS.map(([, kind, words]) => h("li", {}, h("span", { class: "swatch", style: { background: `var(--${kind})` } }), words)));
}

function ranksRows({ ranks, shown }, order) {
  const most = Math.max(...ranks.flatMap((rank) => [rank.window_ns, rank.caused_ns]), 1);
  const thin = ranks.length > 64;
  return ranks.toSorted((one, other) => (order === "rank" ? one.rank - other.rank : other[order] - one[order])).map((rank) => {
    const lines = [`Rank ${rank.rank}`, ["Window", format.ns(rank.window_ns)], ...RANKS_BARS.map(([key, , words]) => [words, format.ns(rank[key])]), ["Arrives last", `${format.count(rank.last)} times`]];
    return h("div", {
      class: `rank${thin ? " thin" : ""}`, onmousemove: (event) => tooltip.show(event.clientX, event.clientY, lines), onmouseleave: tooltip.hide,
    }, thin ? null : h("span", { class: "rank-name" }, `rank ${rank.rank}${rank.rank === shown ? " (shown)" : ""}`),
    h("div", { class: "rank-bars" }, RANKS_BARS.map(([key, kind]) => h("div", { style: { width: `${(100 * rank[key]) / most}%`, background: `var(--${kind})` } }))));
  });
}

function ranksTable(ranks) {
  const columns = [
    { title: "Rank", kind: "count" }, { title: "Window", kind: "ns" }, { title: "Computes", kind: "ns" }, { title: "Waits for others", kind: "ns" },
    { title: "Makes others wait", kind: "ns" }, { title: "Arrives last", kind: "count" },
  ];
  return { caption: "Ranks, in the window", columns, rows: ranks.map((rank) => [rank.rank, rank.window_ns, rank.compute_ns, rank.waited_ns, rank.caused_ns, rank.last]) };
}
