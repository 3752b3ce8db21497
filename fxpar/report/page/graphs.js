// Graphs before and after a pass, side by side.

/** The texts of a group of graphs, which are compressed until someone looks. */
async function textsOf(group) {
  const graphs = DATA.graphs[group];
  if (!graphs.inflated) {
    const bytes = Uint8Array.from(atob(graphs.texts), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    graphs.inflated = await new Response(stream).json();
  }
  return graphs.inflated;
}

function showPasses() {
  const groups = Object.keys(DATA.graphs);
  const [group, before, after] = ["graph-choice", "before-choice", "after-choice"].map(byId);
  if (!groups.length) {
    byId("diff").append(make("p", { class: "empty" }, "The dump has no graphs."));
    return;
  }
  const whole = (DATA.graphs.program?.passes ?? []).map(([name]) => name);
  const option = (name) => make("option", { value: name }, name);
  group.append(...groups.map(option));
  group.value = groups.find((name) => name !== "program") ?? groups[0];

  function chooseGroup() {
    const { passes } = DATA.graphs[group.value];
    after.replaceChildren(...passes.map(([name]) => option(name)));
    const names = passes.map(([name]) => name);
    before.replaceChildren(option("(nothing)"), ...[...new Set([...whole, ...names])].map(option));
    after.value = names.includes("insert_collectives") ? "insert_collectives" : names[0];
    choosePass();
  }

  function choosePass() {
    const pass = DATA.graphs[group.value].passes.find(([name]) => name === after.value);
    before.value = pass[1] ?? "(nothing)";
    show();
  }

  async function text(name) {
    const own = await textsOf(group.value);
    if (name in own) return own[name];
    return name === "(nothing)" ? "" : (await textsOf("program"))[name];
  }

  async function show() {
    const [one, other] = await Promise.all([text(before.value), text(after.value)]);
    showDiff(lines(one), lines(other));
  }

  group.addEventListener("change", chooseGroup);
  after.addEventListener("change", choosePass);
  before.addEventListener("change", show);
  // The graphs are inflated when someone scrolls to them.
  const seen = new IntersectionObserver((entries) => {
    if (entries.some((entry) => entry.isIntersecting)) {
      seen.disconnect();
      chooseGroup();
    }
  });
  seen.observe(byId("passes"));
}

function lines(text) {
  const found = text.split("\n");
  if (found[found.length - 1] === "") found.pop();
  return found;
}

const CONTEXT = 3;
const MOST_LINES = 3000;

function showDiff(before, after) {
  const rows = sideBySide(before, after);
  const removed = rows.filter(([one, other]) => one !== null && one !== other).length;
  const added = rows.filter(([one, other]) => other !== null && one !== other).length;
  byId("diff-summary").textContent = `${removed} lines removed, ${added} added, of ${before.length} and ${after.length}`;
  const body = make("tbody");
  let place = 0;
  while (place < rows.length) {
    let end = place;
    while (end < rows.length && rows[end][0] === rows[end][1]) end++;
    const [head, tail] = [place ? CONTEXT : 0, end < rows.length ? CONTEXT : 0];
    if (end - place > head + tail + 1) {
      appendLines(body, rows.slice(place, place + head));
      body.append(foldedLines(rows.slice(place + head, end - tail)));
      place = end - tail;
    }
    appendLines(body, rows.slice(place, end));
    place = end;
    while (end < rows.length && rows[end][0] !== rows[end][1]) end++;
    const shown = rows.slice(place, Math.min(end, place + MOST_LINES));
    appendLines(body, shown);
    if (place + shown.length < end) body.append(foldedLines(rows.slice(place + shown.length, end)));
    place = end;
  }
  byId("diff").replaceChildren(make("table", {}, make("caption", { class: "visually-hidden" }, "Before and after"), body));
}

function appendLines(body, rows) {
  body.append(...rows.map(lineRow));
}

function lineRow([one, other]) {
  const changed = one !== other;
  return make(
    "tr",
    {},
    make("td", { class: changed && one !== null ? "removed" : null }, one ?? ""),
    make("td", { class: changed && other !== null ? "added" : null }, other ?? ""),
  );
}

function foldedLines(rows) {
  const changed = rows.some(([one, other]) => one !== other);
  const text = `… ${counted(rows.length, changed ? "more line" : "equal line")}`;
  const row = make("tr", { class: "equal" });
  const open = make("button", { type: "button", onclick: () => row.replaceWith(...rows.map(lineRow)) }, text);
  row.append(make("td", { colspan: 2 }, open));
  return row;
}
