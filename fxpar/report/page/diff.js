// Which lines of two texts are equal.

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
