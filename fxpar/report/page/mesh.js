// Ranks by host, and stages.

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
