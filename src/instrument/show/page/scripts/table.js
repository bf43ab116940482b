// Tables that sort and filter, and the table behind each picture.

const TABLE_ROWS = 20; // shown until a click shows all
const TABLE_ROWS_ON_PAPER = 50;
const TABLE_FILTERED = 8; // a table with more rows has a filter

/** The columns of a table from their titles and kinds. */
const tableColumns = (kinds) => Object.entries(kinds).map(([title, kind]) => ({ title, kind }));

/** The class of the cells of a column: names are on the left, and those that may be long are wide. */
const tableClass = (kind) => ({ text: "text", long: "text long" })[kind] ?? null;

/** The rows in order of a column; empty cells come last. */
function tableSorted(rows, index, kind, ascending) {
  const sign = ascending ? 1 : -1;
  return rows.toSorted((one, other) => {
    const [a, b] = [one[index], other[index]];
    if (a == null || b == null) return (a == null) - (b == null);
    return sign * (tableClass(kind) ? String(a).localeCompare(String(b)) : a - b);
  });
}

/**
 * A table; columns are {title, kind}, rows are lists of values in the order of the columns.
 * The address keeps "ID.sort" (a title, after "-" if descending), "ID.filter" and "ID.all".
 */
function dataTable({ id, caption, columns, rows, onRow = null }) {
  const count = h("span", { class: "muted", role: "status" });
  const view = { id, columns, rows, onRow, count, least: TABLE_ROWS, body: h("tbody") };
  const set = (key, text) => {
    state.set(`${id}.${key}`, text);
    tableDraw(view);
  };
  view.heads = columns.map((column, index) => tableHead(view, column, index, set));
  view.more = h("button", { type: "button", onclick: () => set("all", 1) });
  view.filter = h("input", { type: "search", placeholder: "Filter", "aria-label": `Filter: ${caption}` });
  view.filter.addEventListener("input", () => set("filter", view.filter.value));
  tableDraw(view);
  for (const key of ["sort", "filter", "all"]) state.onChange(`${id}.${key}`, () => tableDraw(view));
  window.addEventListener("beforeprint", () => {
    view.least = TABLE_ROWS_ON_PAPER;
    tableDraw(view);
  });
  const controls = rows.length > TABLE_FILTERED ? h("div", { class: "controls" }, view.filter, count) : null;
  const table = h("table", {}, h("caption", {}, caption), h("thead", {}, h("tr", {}, view.heads)), view.body);
  return h("div", { class: "data" }, controls, h("div", { class: "scroll" }, table), view.more);
}

/** The head of a column: a click sorts by it, names upward and numbers downward, the next the other way round. */
function tableHead(view, { title, kind }, index, set) {
  const sort = () => {
    const order = tableOrder(view);
    const ascending = order.index === index ? !order.ascending : tableClass(kind) != null;
    set("sort", `${ascending ? "" : "-"}${title}`);
  };
  const button = h("button", { type: "button", onclick: sort }, title);
  return h("th", { scope: "col", class: tableClass(kind) }, button);
}

/** The column that the address orders by, -1 for none, and the direction. */
function tableOrder({ id, columns }) {
  const text = state.get(`${id}.sort`) ?? "";
  const ascending = !text.startsWith("-");
  return { index: columns.findIndex(({ title }) => title === (ascending ? text : text.slice(1))), ascending };
}

function tableDraw(view) {
  const { id, columns, rows, heads } = view;
  const filter = rows.length > TABLE_FILTERED ? (state.get(`${id}.filter`) ?? "") : "";
  const words = filter.toLowerCase();
  const { index, ascending } = tableOrder(view);
  const fits = (value) => typeof value === "string" && value.toLowerCase().includes(words);
  let chosen = words ? rows.filter((row) => row.some(fits)) : rows;
  if (index >= 0) chosen = tableSorted(chosen, index, columns[index].kind, ascending);
  const part = state.get(`${id}.all`) === "1" ? chosen : chosen.slice(0, view.least);
  const direction = ascending ? "ascending" : "descending";
  heads.forEach((head, at) => head.setAttribute("aria-sort", at === index ? direction : "none"));
  view.body.replaceChildren(...part.map((row) => tableRow(view, row)));
  if (view.filter.value !== filter) view.filter.value = filter;
  view.count.textContent = words ? `${chosen.length} of ${rows.length} rows` : "";
  view.more.hidden = part.length === chosen.length;
  view.more.textContent = `Show all ${chosen.length} rows`;
}

function tableRow({ columns, onRow }, row) {
  const cells = columns.map(({ kind }, at) => h("td", { class: tableClass(kind) }, format[kind](row[at])));
  if (onRow) {
    const open = h("button", { type: "button", onclick: () => onRow(row) }, ...cells[0].childNodes);
    cells[0].replaceChildren(open);
  }
  return h("tr", {}, cells);
}

/** A <details>; the address keeps in "ID.open" that it is not as usual: 1 for open, 0 for closed. */
function disclosure(id, summary, element, { open = false, ...attributes } = {}) {
  const key = `${id}.open`;
  const keep = () => state.set(key, details.open === open ? Number(!open) : null); // the click has no effect yet
  const details = h("details", attributes, h("summary", { onclick: keep }, summary), element);
  const restore = () => {
    details.open = open ? state.get(key) !== "0" : state.get(key) === "1";
  };
  restore();
  state.onChange(key, restore);
  return details;
}

/** What a picture leaves out, closed on the screen and open on paper. */
function behind(id, summary, element) {
  const details = disclosure(id, summary, element);
  window.addEventListener("beforeprint", () => {
    details.open = true;
  });
  return details;
}

/** The numbers of a picture as a table behind it. */
function tableBehind(summary, table) {
  return behind(table.id, summary, dataTable(table));
}

registerView("table", (section, element) => {
  if (section.note) element.append(h("p", { class: "muted" }, section.note));
  if (section.rows.length) element.append(dataTable(section));
});
