// The page of a report. Its data, in the element #data, is what fxpar/analysis/page_data.py and graph_texts.py make.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);

// ---------------------------------------------------------------------------------------------- elements and figures

function byId(id) {
  return document.getElementById(id);
}

/** An element with attributes, event listeners ("onclick") and children, which may be text. */
function make(tag, attributes = {}, ...children) {
  const element = tag.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4))
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function threeDigits(value) {
  if (value >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

function withUnit(value, units) {
  const [factor, unit] = units.find(([least]) => value >= least) ?? units[units.length - 1];
  return `${threeDigits(value / factor)} ${unit}`;
}

function timeText(us) {
  return withUnit(us, [[1e6, "s"], [1e3, "ms"], [1, "us"]]);
}

function bytesText(bytes) {
  return withUnit(bytes, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]);
}

function percent(share) {
  return `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%`;
}

function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const STAGE_HUES = 137.5; // degrees between the hues of neighbouring stages

function stageColour(stage) {
  return `hsl(${(210 + stage * STAGE_HUES) % 360} 45% 66%)`;
}

// -------------------------------------------------------------------------------------------------------- tooltip

const tooltip = byId("tooltip");

function showTooltip(text, x, y) {
  tooltip.textContent = text;
  tooltip.hidden = false;
  const { width, height } = tooltip.getBoundingClientRect();
  tooltip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 8))}px`;
  tooltip.style.top = `${y + 18 + height > innerHeight ? Math.max(4, y - height - 10) : y + 18}px`;
}

function hideTooltip() {
  tooltip.hidden = true;
}

/** Show `text` while the pointer or the focus is on an element. */
function explain(element, text) {
  element.addEventListener("mousemove", (event) => showTooltip(text, event.clientX, event.clientY));
  element.addEventListener("mouseleave", hideTooltip);
  element.addEventListener("focus", () => {
    const box = element.getBoundingClientRect();
    showTooltip(text, box.left, box.bottom - 12);
  });
  element.addEventListener("blur", hideTooltip);
  return element;
}

// ---------------------------------------------------------------------------------------------------------- tables

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

// ---------------------------------------------------------------------------------------------------------- limits

const SHARE_COLOURS = { compute: "--forward", replicated: "--once", bubble: "--message" };

function shareColour(name) {
  return `var(${SHARE_COLOURS[name] ?? "--exposed"})`;
}

function showLimits() {
  const sizes = DATA.axes.filter((axis) => axis.size > 1).map((axis) => `${axis.axis}=${axis.size}`);
  const hosts = new Set(DATA.hosts).size;
  byId("configuration").textContent =
    `${counted(DATA.hosts.length, "rank")} on ${counted(hosts, "host")} of ${DATA.cluster.name}: ` +
    `${sizes.join(" × ") || "one rank"}; ${DATA.schedule}, ${counted(DATA.microbatches, "microbatch")}; action times are ` +
    (DATA.profiled ? "measured" : "estimated");
  const peak = Math.max(0, ...DATA.memory.map(peakBytes));
  const exposed = DATA.shares.filter((share) => share.name.startsWith("exposed")).reduce((sum, { us }) => sum + us, 0);
  const bubble = DATA.shares.find((share) => share.name === "bubble").us;
  const figures = [
    [timeText(DATA.step_us), "predicted step"],
    DATA.measured_us === null ? ["–", "measured step"] : [timeText(DATA.measured_us), "measured step"],
    [percent(bubble / DATA.step_us), "bubble"],
    [percent(exposed / DATA.step_us), "exposed communication"],
    [peak ? bytesText(peak) : "–", "predicted peak memory"],
  ];
  byId("figures").append(
    ...figures.map(([value, label]) => make("div", { class: "figure" }, make("b", {}, value), make("span", {}, label))),
  );
  const parts = DATA.shares.filter((share) => share.us / DATA.step_us > 0.0005);
  const bar = make("div", { class: "shares", role: "img", "aria-label": `Time of the average rank: ${partTexts(parts)}` });
  const legend = make("ul", { class: "legend" });
  for (const part of parts) {
    const share = part.us / DATA.step_us;
    const colour = shareColour(part.name);
    const text = `${part.label}: ${percent(share)}, ${timeText(part.us)}`;
    bar.append(explain(make("span", { style: `width:${100 * share}%;background:${colour}` }), text));
    legend.append(
      make("li", {}, make("i", { style: `background:${colour}` }), `${part.label} `, make("b", {}, percent(share))),
    );
  }
  byId("shares").append(make("h3", {}, "Where the time of the average rank goes"), bar, legend);
  byId("limit-list").append(
    ...DATA.limits.map((limit) =>
      make(
        "li",
        { "data-kind": limit.kind },
        make("div", { class: "share" }, percent(limit.share)),
        make(
          "div",
          {},
          make("h3", {}, limit.title),
          make("p", {}, ...withCode(limit.finding)),
          make("p", { class: "advice" }, ...withCode(limit.advice)),
        ),
      ),
    ),
  );
  if (!DATA.limits.length) {
    byId("limit-list").append(make("li", {}, make("div"), make("p", {}, "Computation: nothing else takes 3% of the step.")));
  }
}

/** Text whose parts in backticks are code. */
function withCode(text) {
  return text.split("`").map((part, place) => (place % 2 ? make("code", {}, part) : part));
}

function partTexts(parts) {
  return parts.map((part) => `${part.label} ${percent(part.us / DATA.step_us)}`).join(", ");
}

function counted(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : noun.endsWith("ch") ? "es" : "s"}`;
}

// ------------------------------------------------------------------------------------------------- mesh and stages

const MOST_RANKS_DRAWN = 512;

function coordinates(rank) {
  const found = {};
  for (const { axis, size } of [...DATA.axes].reverse()) {
    found[axis] = rank % size;
    rank = Math.floor(rank / size);
  }
  return found;
}

function stagesOf(pipe) {
  return DATA.stages.filter((stage) => stage.pipe === pipe).map((stage) => stage.stage);
}

function showMesh() {
  const hosts = new Map();
  DATA.hosts.slice(0, MOST_RANKS_DRAWN).forEach((host, rank) => {
    if (!hosts.has(host)) hosts.set(host, []);
    hosts.get(host).push(rank);
  });
  const picture = make("div", { class: "hosts", role: "group", "aria-label": "Ranks by host, coloured by pipe index" });
  for (const [host, ranks] of hosts) {
    const cells = ranks.map((rank) => {
      const at = coordinates(rank);
      const place = DATA.axes.filter((axis) => axis.size > 1).map(({ axis }) => `${axis} ${at[axis]}`);
      const text = `rank ${rank} on host ${host}\n${place.join(", ")}\nstage ${stagesOf(at.pipe).join(", ")}`;
      return explain(make("span", { class: "rank", style: `background:${stageColour(at.pipe)}` }, String(rank)), text);
    });
    picture.append(make("div", { class: "host" }, make("span", {}, `host ${host}`), make("div", { class: "ranks" }, ...cells)));
  }
  byId("mesh-picture").append(picture);
  if (DATA.hosts.length > MOST_RANKS_DRAWN) {
    byId("mesh-picture").append(make("p", { class: "note" }, `The first ${MOST_RANKS_DRAWN} of ${DATA.hosts.length} ranks.`));
  }
  const times = DATA.stages.map(({ actions }) => Object.values(actions).reduce((sum, us) => sum + us, 0));
  const slowest = Math.max(...times);
  byId("stage-picture").append(make("ol", { class: "stages" }, ...DATA.stages.map((stage) => stageBox(stage, slowest))));
  table(
    byId("axis-table"),
    "Axes of the mesh",
    [
      { title: "axis", get: (axis) => axis.axis },
      figure("ranks", (axis) => axis.size),
      figure("hosts of a group", (axis) => axis.num_hosts),
      { title: "link", get: (axis) => (axis.rings_per_host > 0 ? "between hosts" : "inside hosts") },
      figure("rate of a rank", (axis) => axis.bytes_per_us, (rate) => `${bytesText(1e6 * rate)}/s`),
      figure("latency", (axis) => axis.latency_us, timeText),
    ],
    DATA.axes.filter((axis) => axis.size > 1),
  );
}

function stageBox(stage, slowest) {
  const { F = 0, B = 0 } = stage.actions;
  const bar = make(
    "div",
    { class: "bar" },
    make("i", { style: `width:${(100 * F) / slowest}%;background:var(--forward)` }),
    make("i", { style: `width:${(100 * B) / slowest}%;background:var(--backward)` }),
  );
  const box = make(
    "li",
    { style: `--stage:${stageColour(stage.pipe)}` },
    make("b", {}, `stage ${stage.stage}`),
    make("span", {}, stage.opens ? `from ${stage.opens}` : "from the inputs"),
    make("span", {}, counted(stage.parameters, "parameter")),
    make("span", {}, `${bytesText(stage.num_bytes)}, ${bytesText(stage.rank_bytes)} per rank`),
    make("span", {}, `F ${timeText(F)}${B ? `, B ${timeText(B)}` : ""}`),
    bar,
  );
  const feeds = stage.edges.length ? `\nfeeds stage ${stage.edges.join(", ")}` : "";
  return explain(box, `stage ${stage.stage} on pipe rank ${stage.pipe}${feeds}`);
}

// -------------------------------------------------------------------------------------------------------- timeline

const [BEGIN, END, NAME, KIND, STAGE, MICROBATCH, CRITICAL, EXPOSED] = [0, 1, 2, 3, 4, 5, 6, 7];
const KINDS = {
  F: ["forward", "--forward"],
  B: ["backward", "--backward"],
  I: ["input gradients (I)", "--input"],
  W: ["weight gradients (W)", "--weight"],
  once: ["sums of gradients, gathers", "--once"],
  value: ["message", "--message"],
  gradient: ["message", "--message"],
};
const LABELS = 150;
const ROW = 20;
const GAP = 10;
const AXIS = 26;
const FEW_PIPE_RANKS = 4;

class TimelineView {
  constructor() {
    this.canvas = byId("timeline-canvas");
    this.whole = Math.max(...DATA.timelines.map((timeline) => timeline.end_us), DATA.step_us);
    this.begin = 0;
    this.end = this.whole;
    this.selected = null;
    byId("show-messages").checked = DATA.stages.length <= FEW_PIPE_RANKS;
    this.layOut();
    this.listen();
    this.showLegend();
    this.resize();
    new ResizeObserver(() => this.resize()).observe(this.canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  /** The rows: for every pipe rank, its lanes in each timeline; computations and waits share one. */
  layOut() {
    this.rows = [];
    let y = AXIS;
    const ranks = [...new Set(DATA.timelines.flatMap((timeline) => timeline.tracks.map((track) => track.rank)))];
    for (const rank of ranks.sort((one, other) => one - other)) {
      for (const { label, tracks } of DATA.timelines) {
        const own = tracks.filter((track) => track.rank === rank);
        const busy = own.filter((track) => track.lane !== "sends").flatMap((track) => track.spans);
        y = this.addRow(`rank ${rank} ${label}`, busy, y, label === "simulated");
        if (byId("show-messages").checked) {
          for (const track of own.filter((track) => track.lane === "sends")) y = this.addRow("messages", track.spans, y);
        }
      }
      y += GAP;
    }
    this.height = y;
  }

  addRow(label, spans, y, isSimulated = false) {
    this.rows.push({ label, y, isSimulated, spans: [...spans].sort((one, other) => one[BEGIN] - other[BEGIN]) });
    return y + ROW;
  }

  resize() {
    this.width = this.canvas.parentElement.clientWidth;
    const ratio = devicePixelRatio;
    this.canvas.width = this.width * ratio;
    this.canvas.height = this.height * ratio;
    this.canvas.style.height = `${this.height}px`;
    this.canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    this.draw();
  }

  x(time) {
    return LABELS + ((time - this.begin) / (this.end - this.begin)) * (this.width - LABELS - 8);
  }

  time(x) {
    return this.begin + ((x - LABELS) / (this.width - LABELS - 8)) * (this.end - this.begin);
  }

  draw() {
    const context = this.canvas.getContext("2d");
    context.clearRect(0, 0, this.width, this.height);
    this.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    context.font = this.font;
    context.textBaseline = "middle";
    this.colours = Object.fromEntries(
      ["--text", "--muted", "--line", "--on-bar", "--waiting", "--exposed", "--critical", "--surface", "--accent"]
        .concat(Object.values(KINDS).map(([, colour]) => colour))
        .map((name) => [name, style(name)]),
    );
    this.drawAxis(context);
    for (const row of this.rows) this.drawRow(context, row);
    byId("range").textContent = `${timeText(this.begin)} to ${timeText(this.end)}`;
  }

  drawAxis(context) {
    const ticks = 6;
    const step = niceStep((this.end - this.begin) / ticks);
    context.textAlign = "center";
    for (let at = Math.ceil(this.begin / step) * step; at <= this.end; at += step) {
      const x = this.x(at);
      context.fillStyle = this.colours["--line"];
      context.fillRect(Math.round(x), AXIS - 6, 1, this.height);
      context.fillStyle = this.colours["--muted"];
      if (x > LABELS + 16 && x < this.width - 24) context.fillText(timeText(Math.round(at * 1e3) / 1e3), x, 11);
    }
  }

  drawRow(context, row) {
    context.textAlign = "left";
    context.fillStyle = this.colours[row.label === "messages" ? "--muted" : "--text"];
    context.fillText(row.label, row.label === "messages" ? 24 : 10, row.y + ROW / 2);
    context.save();
    context.beginPath();
    context.rect(LABELS, 0, this.width - LABELS, this.height);
    context.clip();
    for (const span of row.spans) {
      if (span[END] >= this.begin && span[BEGIN] <= this.end) this.drawSpan(context, row, span);
    }
    context.restore();
  }

  drawSpan(context, row, span) {
    const [x, width] = [this.x(span[BEGIN]), Math.max(this.x(span[END]) - this.x(span[BEGIN]), 1)];
    const [y, height] = [row.y + 2, ROW - 4];
    const waits = isWait(span, row);
    context.fillStyle = waits ? this.colours["--waiting"] : this.colours[(KINDS[span[KIND]] ?? KINDS.value)[1]];
    context.fillRect(x, y, width, height);
    if (!waits && width > 3) {
      context.fillStyle = this.colours["--surface"];
      context.fillRect(x + width - 1, y, 1, height);
    }
    if (waits && byId("show-exposed").checked && span[EXPOSED] < span[END]) {
      context.fillStyle = this.colours["--exposed"];
      context.fillRect(this.x(span[EXPOSED]), y + 4, Math.max(this.x(span[END]) - this.x(span[EXPOSED]), 1), height - 8);
    }
    if (row.isSimulated && byId("show-exposed").checked) {
      // Collectives are waited for all over the action: the length of the line is what all waits come to.
      context.fillStyle = this.colours["--exposed"];
      context.fillRect(x, y, this.x(span[BEGIN] + waitedFor(span)) - x, 3);
    }
    if (span[CRITICAL] && byId("show-critical").checked) {
      const from = waits ? this.x(span[EXPOSED]) : x; // before that, the path goes through what made the message
      context.fillStyle = this.colours["--critical"];
      context.fillRect(from, y + height - 2, x + width - from, 2);
    }
    const label = span[MICROBATCH] === null ? span[NAME] : String(span[MICROBATCH]);
    if (!waits && width > 7 * label.length + 5) {
      context.textAlign = "center";
      context.fillStyle = this.colours["--on-bar"];
      context.fillText(label, x + width / 2, row.y + ROW / 2);
    }
    if (this.selected !== null && this.selected.span === span) {
      context.strokeStyle = this.colours["--accent"];
      context.lineWidth = 2;
      context.strokeRect(x, y, width, height);
    }
  }

  showLegend() {
    const kinds = new Set(this.rows.flatMap((row) => row.spans.filter((span) => !isWait(span, row)).map((span) => span[KIND])));
    const shown = new Map([...kinds].filter((kind) => kind in KINDS).map((kind) => KINDS[kind]));
    shown.set("waiting", "--waiting").set("exposed communication", "--exposed").set("critical path", "--critical");
    byId("timeline-legend").replaceChildren(
      ...[...shown].map(([name, colour]) => make("li", {}, make("i", { style: `background:var(${colour})` }), name)),
    );
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  find(x, y) {
    const row = this.rows.find((each) => y >= each.y && y < each.y + ROW);
    const time = this.time(x);
    const near = (2 * (this.end - this.begin)) / this.width;
    const span = x < LABELS ? null : row?.spans.find((each) => each[BEGIN] - near <= time && time <= each[END] + near);
    return span ? { row, span } : null;
  }

  details({ row, span }) {
    const lines = [`${row.label}: ${isWait(span, row) ? `waits for ${span[NAME]}` : span[NAME]}`];
    const kind = KINDS[span[KIND]]?.[0];
    if (kind && span[MICROBATCH] !== null) lines.push(`${kind} of stage ${span[STAGE]}, microbatch ${span[MICROBATCH]}`);
    lines.push(`${timeText(span[END] - span[BEGIN])}, from ${timeText(span[BEGIN])} to ${timeText(span[END])}`);
    if (row.isSimulated && waitedFor(span)) {
      const axes = Object.entries(DATA.waits[`${span[STAGE]}${span[KIND]}`]);
      lines.push(`waits for collectives: ${axes.map(([axis, us]) => `${timeText(us)} over ${axis}`).join(", ")}`);
    }
    if (isWait(span, row) && span[EXPOSED] < span[END]) {
      lines.push(`exposed communication: ${timeText(span[END] - span[EXPOSED])}`);
    }
    if (span[CRITICAL]) lines.push("on the critical path");
    return lines.join("\n");
  }

  /** Show `begin` to `end`, or what of it is within the step. */
  show(begin, end) {
    const length = Math.min(this.whole, Math.max(end - begin, this.whole / 1e5));
    this.begin = Math.max(0, Math.min(begin, this.whole - length));
    this.end = this.begin + length;
    this.draw();
  }

  zoom(factor, around = (this.begin + this.end) / 2) {
    this.show(around - (around - this.begin) * factor, around + (this.end - around) * factor);
  }

  select(row, span) {
    this.selected = { row, span };
    const length = this.end - this.begin;
    if (span[BEGIN] < this.begin || span[END] > this.end) this.show(span[BEGIN] - length / 4, span[BEGIN] + (3 * length) / 4);
    else this.draw();
    const text = this.details(this.selected);
    byId("timeline-live").textContent = text;
    const box = this.canvas.getBoundingClientRect();
    showTooltip(text, box.left + Math.max(LABELS, this.x(span[BEGIN])), box.top + row.y + 4);
  }

  move(rows, spans) {
    if (this.selected === null) {
      const row = this.rows.find((each) => each.spans.length);
      if (row) this.select(row, row.spans[0]);
      return;
    }
    const { row, span } = this.selected;
    if (spans) {
      const next = row.spans[row.spans.indexOf(span) + spans];
      if (next) this.select(row, next);
      return;
    }
    const others = this.rows.filter((each) => each.spans.length);
    const next = others[others.indexOf(row) + rows];
    if (!next) return;
    const distance = (each) => Math.abs(each[BEGIN] - span[BEGIN]);
    this.select(next, next.spans.reduce((best, each) => (distance(each) < distance(best) ? each : best)));
  }

  listen() {
    const { canvas } = this;
    let held = null;
    canvas.addEventListener("pointerdown", (event) => {
      held = { x: event.clientX, begin: this.begin, end: this.end };
      canvas.setPointerCapture(event.pointerId);
      canvas.classList.add("dragged");
    });
    canvas.addEventListener("pointerup", () => {
      held = null;
      canvas.classList.remove("dragged");
    });
    canvas.addEventListener("pointermove", (event) => {
      if (held !== null) {
        hideTooltip();
        const moved = this.time(held.x) - this.time(event.clientX);
        this.show(held.begin + moved, held.end + moved);
        return;
      }
      const found = this.find(...this.at(event));
      if (found) showTooltip(this.details(found), event.clientX, event.clientY);
      else hideTooltip();
    });
    canvas.addEventListener("pointerleave", hideTooltip);
    canvas.addEventListener("blur", hideTooltip);
    canvas.addEventListener("dblclick", (event) => this.zoom(0.5, this.time(this.at(event)[0])));
    canvas.addEventListener(
      "wheel",
      (event) => {
        if (!event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        this.zoom(event.deltaY < 0 ? 0.8 : 1.25, this.time(this.at(event)[0]));
      },
      { passive: false },
    );
    const keys = {
      ArrowRight: () => this.move(0, 1),
      ArrowLeft: () => this.move(0, -1),
      ArrowDown: () => this.move(1, 0),
      ArrowUp: () => this.move(-1, 0),
      "+": () => this.zoom(0.5),
      "=": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      0: () => this.show(0, this.whole),
      Enter: () => {
        if (this.selected === null) return;
        const { span } = this.selected;
        const margin = (span[END] - span[BEGIN]) / 2;
        this.show(span[BEGIN] - margin, span[END] + margin);
        this.select(this.selected.row, span);
      },
      Escape: () => {
        this.selected = null;
        hideTooltip();
        this.draw();
      },
    };
    canvas.addEventListener("keydown", (event) => {
      if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      keys[event.key]();
    });
    byId("zoom-in").addEventListener("click", () => this.zoom(0.5));
    byId("zoom-out").addEventListener("click", () => this.zoom(2));
    byId("zoom-reset").addEventListener("click", () => this.show(0, this.whole));
    for (const id of ["show-critical", "show-exposed"]) byId(id).addEventListener("change", () => this.draw());
    byId("show-messages").addEventListener("change", () => {
      this.selected = null;
      this.layOut();
      this.showLegend();
      this.resize();
    });
  }
}

/** How long an action waits for collectives, in microseconds. */
function waitedFor(span) {
  const waits = DATA.waits[`${span[STAGE]}${span[KIND]}`] ?? {};
  return Object.values(waits).reduce((sum, us) => sum + us, 0);
}

function isWait(span, row) {
  return row.label !== "messages" && (span[KIND] === "value" || span[KIND] === "gradient");
}

/** 1, 2 or 5 times a power of ten, at least `least`. */
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= least);
}

// -------------------------------------------------------------------------------------------------------- pictures

/** The width to draw a picture for, so that its texts have the size of others. */
function widthOf(id) {
  return Math.max(byId(id).clientWidth, 560);
}

/** Draw now, and whenever the element gets another width. */
function redrawn(id, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (byId(id).clientWidth !== width) draw();
    width = byId(id).clientWidth;
  }).observe(byId(id));
}

// ---------------------------------------------------------------------------------------------------------- memory

function totals(memory) {
  const kinds = Object.values(memory.kinds);
  return memory.times.map((_, place) => kinds.reduce((sum, values) => sum + values[place], 0));
}

function peakBytes(memory) {
  return Math.max(...totals(memory));
}

function showMemory() {
  if (!DATA.memory.length) {
    byId("memory-picture").append(make("p", { class: "empty" }, "The memory of some stages is not known."));
    return;
  }
  const peaks = DATA.memory.map(peakBytes);
  const choice = byId("memory-rank");
  choice.append(...DATA.memory.map(({ rank }, place) => make("option", { value: place }, `${rank}: peak ${bytesText(peaks[place])}`)));
  choice.value = peaks.indexOf(Math.max(...peaks));
  const draw = () => drawMemory(DATA.memory[choice.value]);
  choice.addEventListener("change", draw);
  redrawn("memory-picture", draw);
}

function drawMemory(memory) {
  const [width, height, left, bottom, top] = [widthOf("memory-picture"), 300, 70, 26, 12];
  const { times } = memory;
  const sums = totals(memory);
  const peak = Math.max(...sums);
  const last = times[times.length - 1];
  const x = (time) => left + (time / last) * (width - left - 10);
  const y = (bytes) => height - bottom - (bytes / (peak * 1.05)) * (height - bottom - top);
  const kinds = Object.entries(memory.kinds).filter(([, values]) => values.some((value) => value > 0));
  const places = Object.keys(memory.kinds);
  const svg = make("svg:svg", {
    viewBox: `0 0 ${width} ${height}`,
    role: "img",
    "aria-label": `Memory of pipe rank ${memory.rank}: peak ${bytesText(peak)}`,
  });
  const step = niceStep(peak / 5);
  for (let bytes = 0; bytes <= peak * 1.05; bytes += step) {
    svg.append(
      make("svg:line", { class: "grid", x1: left, x2: width - 10, y1: y(bytes), y2: y(bytes) }),
      make("svg:text", { x: left - 8, y: y(bytes) + 4, "text-anchor": "end" }, bytesText(bytes)),
    );
  }
  const below = times.map(() => 0);
  for (const [name, values] of kinds) {
    const from = [...below];
    values.forEach((value, place) => (below[place] += value));
    const edge = (heights) => times.map((time, place) => `${x(time).toFixed(1)},${y(heights[place]).toFixed(1)}`);
    const points = [...steps(edge(below)), ...steps(edge(from)).reverse()].join(" ");
    svg.append(make("svg:polygon", { points, fill: `var(--memory-${places.indexOf(name)})` }));
  }
  for (const part of [0, 0.25, 0.5, 0.75, 1]) {
    const anchor = part === 0 ? "start" : part === 1 ? "end" : "middle";
    svg.append(make("svg:text", { x: x(part * last), y: height - 8, "text-anchor": anchor }, timeText(part * last)));
  }
  const cursor = make("svg:line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
  svg.append(cursor);
  svg.addEventListener("mousemove", (event) => {
    const box = svg.getBoundingClientRect();
    const time = ((((event.clientX - box.left) / box.width) * width - left) / (width - left - 10)) * last;
    const place = Math.max(0, times.findLastIndex((each) => each <= time));
    cursor.setAttribute("x1", x(times[place]));
    cursor.setAttribute("x2", x(times[place]));
    cursor.setAttribute("visibility", "visible");
    const lines = kinds.map(([name, values]) => `${name}: ${bytesText(values[place])}`).reverse();
    const what = `${place % 2 ? "after" : "in"} ${memory.actions[Math.floor(place / 2)]}, ${timeText(times[place])}`;
    showTooltip([`${what}: ${bytesText(sums[place])}`, ...lines].join("\n"), event.clientX, event.clientY);
  });
  svg.addEventListener("mouseleave", () => (cursor.setAttribute("visibility", "hidden"), hideTooltip()));
  byId("memory-picture").replaceChildren(svg);
  byId("memory-legend").replaceChildren(
    ...kinds.map(([name]) => make("li", {}, make("i", { style: `background:var(--memory-${places.indexOf(name)})` }), name)),
  );
  const place = sums.indexOf(peak);
  byId("memory-peak").textContent = `peak ${bytesText(peak)} in ${memory.actions[Math.floor(place / 2)]}`;
}

/** Points with the corner between each two of them: memory changes at once. */
function steps(points) {
  return points.flatMap((point, place) => (place ? [`${point.split(",")[0]},${points[place - 1].split(",")[1]}`, point] : [point]));
}

// ---------------------------------------------------------------------------------------------------------- tables

function showTables() {
  table(
    byId("traffic-table"),
    "Communication by axis and kind",
    [
      { title: "axis", get: (row) => row.axis },
      { title: "kind", get: (row) => row.kind },
      figure("count", (row) => row.count, threeDigits),
      figure("bytes sent", (row) => row.sent_bytes, bytesText),
      figure("time", (row) => row.time_us, timeText),
      figure("exposed", (row) => row.exposed_us, timeText),
      figure("of it exposed", (row) => (row.time_us ? row.exposed_us / row.time_us : 0), percent),
    ],
    DATA.traffic,
    { sort: 4 },
  );
  table(
    byId("layout-table"),
    "Layouts by module",
    [
      { title: "name", get: (row) => row[0] || "(no module)", code: true },
      { title: "kind", get: (row) => row[1] },
      figure("stage", (row) => row[2]),
      { title: "dtype", get: (row) => row[3] },
      { title: "shape", get: (row) => row[4].join(" × ") || "scalar" },
      { title: "layout", get: (row) => row[5], code: true },
      figure("bytes", (row) => row[6], bytesText),
      figure("per rank", (row) => row[7], bytesText),
    ],
    DATA.layouts,
  );
  table(
    byId("collective-table"),
    "Collectives",
    [
      figure("stage", (row) => row[0]),
      { title: "graph", get: (row) => row[1] },
      { title: "kind", get: (row) => row[2] },
      { title: "axis", get: (row) => row[3] },
      { title: "module", get: (row) => row[7], code: true },
      figure("count", (row) => row[9]),
      figure("sent", (row) => row[4], bytesText),
      figure("time", (row) => row[5], timeText),
      figure("exposed", (row) => row[6], timeText),
      { title: "verdict", get: (row) => row[8] },
    ],
    DATA.collectives,
    { sort: 8 },
  );
  table(
    byId("replicated-table"),
    "Replicated ops",
    [
      figure("stage", (row) => row[0]),
      { title: "op", get: (row) => row[1], code: true },
      { title: "module", get: (row) => row[2] || "(no module)", code: true },
      figure("count", (row) => row[3]),
      { title: "along", get: (row) => row[4] },
      { title: "sharding rule", get: (row) => (row[5] ? "yes" : "none") },
      figure("time", (row) => row[6], timeText),
      figure("wasted", (row) => row[7], timeText),
    ],
    DATA.replicated,
    { sort: 7 },
  );
}

// ------------------------------------------------------------------------------------------------------- transfers

const MOST_LINKS = 600;

function showTransfers() {
  const choice = byId("transfer-choice");
  if (!DATA.transfers.length) {
    choice.closest(".toolbar").hidden = true;
    byId("transfer-picture").append(make("p", { class: "empty" }, "Nothing moves between stages."));
    return;
  }
  choice.append(
    ...DATA.transfers.map(({ name, names }, place) => {
      const others = names.length > 1 ? `, and ${names.length - 1} alike` : "";
      return make("option", { value: place, title: names.join("\n") }, name + others);
    }),
  );
  const draw = () => drawTransfer(DATA.transfers[choice.value]);
  choice.addEventListener("change", draw);
  redrawn("transfer-picture", draw);
}

function drawTransfer(transfer) {
  const layouts = [...new Set(transfer.target_layouts)].join(", ");
  const between = transfer.num_bytes
    ? `${bytesText(transfer.num_bytes)} between hosts, makespan ${bytesText(transfer.makespan_bytes)}, ` +
      `lower bound ${bytesText(transfer.bound_bytes)} at the rate of one interface`
    : "inside hosts alone";
  const often = transfer.once_per_step ? "once per step" : "for every microbatch";
  const text =
    `${transfer.source_layout} → ${layouts}, by ${transfer.strategy}, ${often}: ${between}; ` +
    `${timeText(transfer.time_us)} if alone.`;
  byId("transfer-picture").replaceChildren(
    make("p", { class: "note" }, text),
    transferLinks(transfer),
    ...(transfer.num_bytes ? [transferLanes(transfer)] : []),
  );
}

function transferLinks({ relays, name }) {
  const hops = relays.flatMap(([, bytes, path, readers]) => {
    const onward = path.slice(1).map((to) => ({ from: path[0], to, bytes, path, reads: false }));
    const read = path.flatMap((owner, place) =>
      readers[place].map((to) => ({ from: path.length > 1 ? owner : path[0], to, bytes, path, reads: true })),
    );
    return [...onward, ...read];
  });
  const senders = [...new Set(relays.map(([, , path]) => path[0]))].sort((one, other) => one - other);
  const receivers = [...new Set(hops.map(({ to }) => to))].sort((one, other) => one - other);
  const [width, row, top] = [widthOf("transfer-picture"), 24, 8];
  const [left, right, box] = [0.1 * width, 0.9 * width - 150, 150];
  const height = top + row * Math.max(senders.length, receivers.length, 1);
  const svg = make("svg:svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Who sends what: ${name}` });
  const y = (ranks, rank) => top + row * (ranks.indexOf(rank) + 0.5) + ((height - top) / 2 - (row * ranks.length) / 2);
  for (const { from, to, bytes, path, reads } of hops.slice(0, MOST_LINKS)) {
    const onRight = !senders.includes(from);
    const middle = onRight ? right - 70 : (left + box + right) / 2;
    const [fromX, fromY] = onRight ? [right, y(receivers, from)] : [left + box, y(senders, from)];
    const [toX, toY] = [right, y(receivers, to)];
    const crosses = DATA.hosts[from] !== DATA.hosts[to];
    const curve = `M${fromX} ${fromY} C${middle} ${fromY} ${middle} ${toY} ${toX} ${toY}`;
    const link = make("svg:path", { d: curve, class: `link${reads ? " reader" : crosses ? " between" : ""}`, "stroke-width": 2 });
    const how = reads ? "reads from the memory of its host" : crosses ? "over the network" : "inside the host";
    svg.append(explain(link, `rank ${from} → rank ${to}: ${bytesText(bytes)}, ${how}\nchain: ${path.join(" → ")}`));
  }
  for (const [ranks, x] of [[senders, left], [receivers, right]]) {
    for (const rank of ranks) {
      const middle = y(ranks, rank);
      svg.append(
        make("svg:rect", { class: "node", x, y: middle - 9, width: box, height: 18, rx: 3 }),
        make("svg:text", { class: "name", x: x + 8, y: middle + 4 }, `rank ${rank}`),
        make("svg:text", { x: x + box - 8, y: middle + 4, "text-anchor": "end" }, `host ${DATA.hosts[rank]}`),
      );
    }
  }
  return svg;
}

/** What the interface of each host sends and receives, in bytes at its rate. */
function transferLanes({ relays, bound_bytes, makespan_bytes, name }) {
  const lanes = new Map();
  for (const [task, bytes, path, , begin, end] of relays) {
    for (let hop = 1; hop < path.length; hop++) {
      for (const [rank, what] of [[path[hop - 1], "sends"], [path[hop], "receives"]]) {
        const lane = `host ${DATA.hosts[rank]} ${what}`;
        if (!lanes.has(lane)) lanes.set(lane, []);
        lanes.get(lane).push({ task, bytes, begin, end, text: `task ${task}: rank ${path[hop - 1]} → rank ${path[hop]}` });
      }
    }
  }
  const names = [...lanes.keys()].sort((one, other) => one.localeCompare(other, "en", { numeric: true }));
  const [width, row, left, top] = [widthOf("transfer-picture"), 22, 150, 22];
  const height = top + row * names.length + 8;
  const last = Math.max(makespan_bytes, bound_bytes);
  const x = (bytes) => left + (bytes / last) * (width - left - 12);
  const svg = make("svg:svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `When interfaces send: ${name}` });
  names.forEach((lane, place) => {
    const y = top + place * row;
    svg.append(make("svg:text", { class: "name", x: 8, y: y + 14 }, lane));
    for (const { task, bytes, begin, end, text } of lanes.get(lane)) {
      const bar = make("svg:rect", {
        x: x(begin),
        y: y + 2,
        width: Math.max(x(end) - x(begin) - 1, 1),
        height: row - 5,
        fill: stageColour(task),
      });
      svg.append(explain(bar, `${text}, ${bytesText(bytes)}`));
    }
  });
  const at = x(bound_bytes);
  svg.append(
    make("svg:line", { class: "cursor", x1: at, x2: at, y1: top - 4, y2: height - 6 }),
    make("svg:text", { x: at - 4, y: 14, "text-anchor": "end" }, `lower bound ${bytesText(bound_bytes)}`),
  );
  return svg;
}

// ---------------------------------------------------------------------------------------------------------- passes

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

/** Pairs of lines: equal ones, and those that were removed beside those that were added in their place. */
function sideBySide(before, after) {
  const rows = [];
  let [from, to] = [0, 0];
  for (const [one, other] of [...matches(before, 0, before.length, after, 0, after.length), [before.length, after.length]]) {
    for (; from < one || to < other; ) {
      rows.push([from < one ? before[from++] : null, to < other ? after[to++] : null]);
    }
    if (one < before.length) rows.push([before[from++], after[to++]]);
  }
  return rows;
}

/** The places of equal lines, ascending, as patience diff finds them: lines that occur once in both anchor the rest. */
function matches(before, begin, end, after, start, stop) {
  const found = [];
  while (begin < end && start < stop && before[begin] === after[start]) found.push([begin++, start++]);
  const last = [];
  while (begin < end && start < stop && before[end - 1] === after[stop - 1]) last.unshift([--end, --stop]);
  const anchors = begin < end && start < stop ? ascending(uniqueInBoth(before, begin, end, after, start, stop)) : [];
  if (anchors.length) {
    for (const [one, other] of [...anchors, [end, stop]]) {
      found.push(...matches(before, begin, one, after, start, other));
      if (one < end) found.push([one, other]);
      [begin, start] = [one + 1, other + 1];
    }
  }
  return found.concat(last);
}

function uniqueInBoth(before, begin, end, after, start, stop) {
  const places = new Map();
  for (let place = begin; place < end; place++) places.set(before[place], places.has(before[place]) ? null : [place, null]);
  for (let place = start; place < stop; place++) {
    const pair = places.get(after[place]);
    if (pair) places.set(after[place], pair[1] === null ? [pair[0], place] : null);
  }
  return [...places.values()].filter((pair) => pair && pair[1] !== null);
}

/** The longest part of the pairs whose second places ascend, too. */
function ascending(pairs) {
  const tops = [];
  const before = new Map();
  for (const pair of pairs) {
    let [low, high] = [0, tops.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (tops[middle][1] < pair[1]) low = middle + 1;
      else high = middle;
    }
    before.set(pair, low ? tops[low - 1] : null);
    tops[low] = pair;
  }
  const chain = [];
  for (let pair = tops[tops.length - 1] ?? null; pair !== null; pair = before.get(pair)) chain.unshift(pair);
  return chain;
}

showLimits();
showMesh();
const timelineView = new TimelineView();
showTables();
showMemory();
showTransfers();
showPasses();
document.documentElement.dataset.ready = "true";
