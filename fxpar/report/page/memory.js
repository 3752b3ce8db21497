// Memory of a rank over the step, as an area for each use.

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
