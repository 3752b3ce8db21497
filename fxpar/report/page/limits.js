// The top: figures, where the time goes, and what limits the step.

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
  const exposed = DATA.parts.filter((part) => part.name.startsWith("exposed")).reduce((sum, { time_us }) => sum + time_us, 0);
  const bubble = DATA.parts.find((part) => part.name === "bubble").time_us;
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
  const parts = DATA.parts.filter((part) => part.time_us / DATA.step_us > 0.0005);
  const bar = make("div", { class: "shares", role: "img", "aria-label": `Time of the average rank: ${partTexts(parts)}` });
  const legend = make("ul", { class: "legend" });
  for (const part of parts) {
    const share = part.time_us / DATA.step_us;
    const colour = shareColour(part.name);
    const text = `${part.label}: ${percent(share)}, ${timeText(part.time_us)}`;
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
  return parts.map((part) => `${part.label} ${percent(part.time_us / DATA.step_us)}`).join(", ");
}

function counted(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : noun.endsWith("ch") ? "es" : "s"}`;
}
