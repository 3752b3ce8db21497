// The tables of communication, layouts, collectives and replicated ops.

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
