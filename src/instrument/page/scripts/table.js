// Tables that sort and filter, and the table behind each picture.

const ROWS_SHOWN = 20;

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

/** A table; columns are {title, kind}, rows are lists of values in the order of the columns. */
function dataTable({ caption, columns, rows, onRow = null }) {
  let shown = ROWS_SHOWN, order = null, words = "";
  const body = h("tbody"), count = h("span", { class: "muted", role: "status" });
  const more = h("button", { type: "button", onclick: () => { shown = Infinity; draw(); } });
  const heads = columns.map(({ title, kind }, index) => {
    const sort = () => {
      const ascending = order?.index === index ? !order.ascending : tableClass(kind) != null;
      order = { index, ascending };
      heads.forEach((head, at) => head.setAttribute("aria-sort", at === index ? (ascending ? "ascending" : "descending") : "none"));
      draw();
    };
    return h("th", { scope: "col", class: tableClass(kind), "aria-sort": "none" }, h("button", { type: "button", onclick: sort }, title));
  });
  const filter = h("input", {
    type: "search", placeholder: "Filter", "aria-label": `Filter: ${caption}`, oninput: () => { words = filter.value.toLowerCase(); draw(); },
  });
  const cell = (value, { kind }) => h("td", { class: tableClass(kind) }, format[kind](value));
  function draw() {
    let chosen = rows;
    if (words) chosen = chosen.filter((row) => row.some((value) => typeof value === "string" && value.toLowerCase().includes(words)));
    if (order) chosen = tableSorted(chosen, order.index, columns[order.index].kind, order.ascending);
    const part = chosen.slice(0, shown);
    body.replaceChildren(...part.map((row) => tableRow(row, columns, cell, onRow)));
    count.textContent = words ? `${chosen.length} of ${rows.length} rows` : "";
    more.hidden = part.length === chosen.length;
    more.textContent = `Show all ${chosen.length} rows`;
  }
  draw();
  const controls = rows.length > 8 ? h("div", { class: "controls" }, filter, count) : null;
  const table = h("table", {}, h("caption", {}, caption), h("thead", {}, h("tr", {}, heads)), body);
  window.addEventListener("beforeprint", () => { shown = Math.max(shown, 50); draw(); });
  return h("div", { class: "data" }, controls, h("div", { class: "scroll" }, table), more);
}

function tableRow(row, columns, cell, onRow) {
  const cells = row.slice(0, columns.length).map((value, index) => cell(value, columns[index]));
  if (onRow) {
    const open = h("button", { type: "button", onclick: () => onRow(row) }, ...cells[0].childNodes);
    cells[0].replaceChildren(open);
  }
  return h("tr", {}, cells);
}

/** A closed <details> with the numbers of a picture; open on paper. */
function behind(summary, element) {
  const details = h("details", {}, h("summary", {}, summary), element);
  window.addEventListener("beforeprint", () => { details.open = true; });
  return details;
}

registerView("table", (section, element) => {
  if (section.note) element.append(h("p", { class: "muted" }, section.note));
  element.append(dataTable(section));
});
