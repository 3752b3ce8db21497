// The timeline on a canvas: simulated and measured, with zoom, pan, hover and keyboard.

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
