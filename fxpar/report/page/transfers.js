// Transfers between stages: who sends what to whom, and when.

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
