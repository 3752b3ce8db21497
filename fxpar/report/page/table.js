// Tables that sort and search.

const ROWS_AT_FIRST = 100;

/**
 * A table whose headers sort it, under a search field if there are many rows.
 *
 * A column has a `title`, `get(row)` for its value, `show(value)` for its text, and perhaps `number` or `code`.
 */
function table(container, label, columns, rows, { sort = null, descending = true } = {}) {
  if (!rows.length) {
    container.replaceChildren(make("p", { class: "empty" }, "There are none."));
    return;
  }
  const state = { sort, descending, wanted: "", all: false };
  const texts = new Map(rows.map((row) => [row, columns.map((c) => text(c, row)).join(" ").toLowerCase()]));
  const body = make("tbody");
  const count = make("output", { "aria-live": "polite" });
  const headers = columns.map((column, place) =>
    make(
      "th",
      { class: column.number ? "number" : null, scope: "col" },
      make("button", { type: "button", onclick: () => sortBy(place) }, column.title),
    ),
  );
  const search = make("input", {
    type: "search",
    placeholder: "Search",
    "aria-label": `Search ${label}`,
    oninput: () => {
      state.wanted = search.value.trim().toLowerCase();
      show();
    },
  });
  const more = make("button", { type: "button", class: "more", onclick: () => ((state.all = true), show()) });

  function text(column, row) {
    const value = column.get(row);
    return column.show ? column.show(value) : String(value);
  }

  function sortBy(place) {
    state.descending = state.sort === place ? !state.descending : Boolean(columns[place].number);
    state.sort = place;
    show();
  }

  function compare(one, other) {
    const [a, b] = [columns[state.sort].get(one), columns[state.sort].get(other)];
    const order = typeof a === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
    return state.descending ? -order : order;
  }

  function show() {
    const words = state.wanted.split(/\s+/);
    const found = rows.filter((row) => words.every((word) => texts.get(row).includes(word)));
    if (state.sort !== null) found.sort(compare);
    const shown = state.all ? found : found.slice(0, ROWS_AT_FIRST);
    body.replaceChildren(
      ...shown.map((row) =>
        make(
          "tr",
          {},
          ...columns.map((c) => make("td", { class: c.number ? "number" : c.code ? "code" : null }, text(c, row))),
        ),
      ),
    );
    headers.forEach((header, place) => {
      if (place !== state.sort) header.removeAttribute("aria-sort");
      else header.setAttribute("aria-sort", state.descending ? "descending" : "ascending");
    });
    count.textContent = found.length === rows.length ? `${rows.length} rows` : `${found.length} of ${rows.length} rows`;
    more.hidden = shown.length === found.length;
    more.textContent = `Show all ${found.length} rows`;
  }

  const bar = rows.length > 5 ? make("div", { class: "toolbar" }, search, count) : null;
  const grid = make("table", {}, make("caption", { class: "visually-hidden" }, label));
  grid.append(make("thead", {}, make("tr", {}, ...headers)), body);
  container.replaceChildren(
    ...[bar, make("div", { class: "table", tabindex: 0, role: "region", "aria-label": label }, grid), more].filter(Boolean),
  );
  show();
}

const figure = (title, get, show) => ({ title, get, show, number: true });
