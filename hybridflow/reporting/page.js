// Draws what hybridflow/reporting/page.py has put into #data. Whatever comes from a run goes onto the page as text.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const SVG = "http://www.w3.org/2000/svg";
const COLORS = 8; // further runs have them again, dashed
const MARGIN = { left: 54, right: 12, top: 20, bottom: 36 }; // above and below the axes stand unit and "iteration"
const HEIGHT = 196;
const FOLDED = 600, FOLDED_LINES = 12; // a sample's longer text shows its beginning
const BYTES = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]];
const STATES = { finished: "Finished", running: "Running", stopped: "Stopped", failed: "Failed", unknown: "End not known" };
const STACKED = ["time/rollout_seconds", "time/estimate_seconds", "time/update_seconds", "time/save_seconds"];
const NAMES = { "time/rollout_seconds": "rollout", "time/estimate_seconds": "estimate", "time/update_seconds": "update", "time/save_seconds": "save" };

const hidden = new Set(); // numbers of runs that are not drawn
let smoothing = 0;
let axis = "iteration"; // or tokens, hours

const byId = (id) => document.getElementById(id);

// ---------------------------------------------------------------- elements

function put(parent, tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") element.className = value;
    else element[name] = value;
  }
  element.append(...children);
  parent?.append(element);
  return element;
}

function draw(parent, tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

// a name that may be broken after its dots, lines and slashes
const breakable = (name) => name.split(/(?<=[._/])/).flatMap((part, i) => (i ? [document.createElement("wbr"), part] : [part]));

const colorOf = (run) => `k${run % COLORS}` + (run >= COLORS ? " dashed" : "");

function shown(value, unit = "") {
  if (value === null || value === undefined) return "not finite";
  const size = Math.abs(value);
  const [scale, name] = (unit === "bytes" && BYTES.find(([least]) => size >= least)) || [1, ""];
  if (name) return `${Number((value / scale).toPrecision(4))} ${name}`;
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

const valued = (value, unit) => shown(value, unit) + (value !== null && unit && !(unit === "bytes" && Math.abs(value) >= 1e3) ? ` ${unit}` : "");

// ---------------------------------------------------------------- scales

function niceStep(span, count) {
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.75);
}

function ticks(low, high, count) {
  const step = niceStep(high - low, count);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

function range(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value === null) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return [0, 1];
  if (low === high) return [low - (Math.abs(low) * 0.1 || 0.5), high + (Math.abs(high) * 0.1 || 0.5)];
  const room = (high - low) * 0.04;
  return [low - room, high + room];
}

function smooth(values) {
  // exponential, corrected for its start; a gap stays a gap
  let mean = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = smoothing * mean + (1 - smoothing) * value;
    weight = smoothing * weight + (1 - smoothing);
    return mean / weight;
  });
}

function axes(svg, width, xs, ys, unit, below = "iteration") {
  const [x0, x1] = xs, [y0, y1] = ys;
  const right = width - MARGIN.right, bottom = HEIGHT - MARGIN.bottom;
  const x = (value) => MARGIN.left + ((value - x0) / (x1 - x0)) * (right - MARGIN.left);
  const y = (value) => bottom - ((value - y0) / (y1 - y0)) * (bottom - MARGIN.top);
  for (const value of ticks(y0, y1, 4)) {
    draw(svg, "line", { class: "grid", x1: MARGIN.left, x2: right, y1: y(value), y2: y(value) });
    draw(svg, "text", { x: MARGIN.left - 6, y: y(value) + 4, "text-anchor": "end" }, shown(value, unit));
  }
  if (unit) draw(svg, "text", { class: "unit", x: MARGIN.left, y: 11 }, unit);
  draw(svg, "text", { class: "unit", x: (MARGIN.left + right) / 2, y: HEIGHT - 3, "text-anchor": "middle" }, below);
  for (const value of ticks(x0, x1, Math.max(2, Math.min(6, width / 90)))) {
    const text = below === "iteration" ? String(value) : shown(value);
    if (below !== "iteration" || value % 1 === 0) draw(svg, "text", { x: x(value), y: HEIGHT - 20, "text-anchor": "middle" }, text);
  }
  return { x, y, bottom };
}

// what the x-axis has at the end of an iteration, on straight lines between the points that the page has
function placeOf(run, iteration) {
  if (axis === "iteration") return iteration;
  const { x, y } = run.axes[axis];
  if (iteration <= x[0]) return y[0];
  let i = nearest(x, iteration);
  if (x[i] < iteration) i++;
  if (i >= x.length) return y[x.length - 1];
  return y[i - 1] + ((y[i] - y[i - 1]) * (iteration - x[i - 1])) / (x[i] - x[i - 1]);
}

function placed(run, curve) {
  if (axis === "iteration") return curve;
  const own = { ...curve, x: curve.x.map((at) => placeOf(run, at)) };
  if (curve.end) own.end = curve.end.map((at) => placeOf(run, at));
  return own;
}

function extent(curves) {
  let low = Infinity, high = -Infinity;
  for (const curve of curves) {
    if (!curve.x.length) continue;
    low = Math.min(low, curve.x[0]);
    high = Math.max(high, (curve.end ?? curve.x)[curve.x.length - 1]);
  }
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}

function path(xs, ys, x, y) {
  let text = "", pen = false;
  for (let i = 0; i < xs.length; i++) {
    if (ys[i] === null) { pen = false; continue; }
    text += `${pen ? "L" : "M"}${x(xs[i]).toFixed(1)} ${y(ys[i]).toFixed(1)}`;
    pen = true;
  }
  return text;
}

function band(curve, x, y) {
  // a strip from the least to the largest value, cut where none is finite
  let text = "";
  for (let i = 0; i < curve.x.length; ) {
    let end = i;
    while (end < curve.x.length && curve.low[end] !== null) end++;
    if (end > i) {
      const up = [], down = [];
      for (let k = i; k < end; k++) {
        up.push(`${x(curve.x[k]).toFixed(1)} ${y(curve.high[k]).toFixed(1)}`);
        down.unshift(`${x(curve.x[k]).toFixed(1)} ${y(curve.low[k]).toFixed(1)}`);
      }
      text += `M${up.concat(down).join("L")}Z`;
    }
    i = Math.max(end, i + 1);
  }
  return text;
}

// ---------------------------------------------------------------- tooltip

const tip = put(document.body, "div", { class: "tip", hidden: true });

function showTip(event, title, lines) {
  tip.replaceChildren(put(null, "div", {}, title));
  for (const [color, text] of lines) put(tip, "span", { class: color }, put(null, "i"), put(null, "b", {}, text));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 14 + box.width > innerWidth ? event.clientX - 14 - box.width : event.clientX + 14;
  tip.style.left = `${Math.max(4, Math.min(left, innerWidth - box.width - 4))}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 4))}px`;
}

function nearest(xs, wanted) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low > 0 && wanted - xs[low - 1] <= xs[low] - wanted ? low - 1 : low;
}

function follow(svg, width, xs, scale, describe) {
  const pointer = draw(svg, "line", { class: "pointer", y1: MARGIN.top, y2: scale.bottom, visibility: "hidden" });
  const move = (event) => {
    const at = event.clientX - svg.getBoundingClientRect().left;
    const share = (at - MARGIN.left) / (width - MARGIN.right - MARGIN.left);
    const found = describe(xs[0] + share * (xs[1] - xs[0]));
    if (found === null) return;
    pointer.setAttribute("visibility", "visible");
    pointer.setAttribute("x1", scale.x(found.x));
    pointer.setAttribute("x2", scale.x(found.x));
    showTip(event, found.title, found.lines);
  };
  const leave = () => {
    pointer.setAttribute("visibility", "hidden");
    tip.hidden = true;
  };
  svg.addEventListener("pointermove", move);
  svg.addEventListener("pointerdown", move);
  svg.addEventListener("pointerleave", leave);
}

const span = (curve, i) =>
  curve.per > 1 && curve.end[i] !== curve.x[i] ? `iterations ${curve.x[i]} to ${curve.end[i]}` : `iteration ${curve.x[i]}`;

function told(curve, i, smoothed, unit) {
  let text = valued(curve.y[i], unit);
  if (curve.per > 1 && curve.y[i] !== null) text = `mean ${text} (${shown(curve.low[i], unit)} to ${shown(curve.high[i], unit)})`;
  if (curve.per > 1 && curve.lost[i]) text += `, ${curve.lost[i]} not finite`;
  return smoothing && smoothed[i] !== null ? `${text}, smoothed ${valued(smoothed[i], unit)}` : text;
}

// ---------------------------------------------------------------- curves

const charts = []; // {figure, metric, title, unit, group, count}
const flatRows = []; // {row, metric, title}

const ends = (metric) =>
  RUNS.filter((run) => run.ends[metric]).map((run) => `${run.label} ${run.ends[metric].join(" to ")}`).join("; ");

function drawChart({ figure, metric, title, unit }) {
  figure.querySelector("svg")?.remove();
  const width = figure.clientWidth - 20;
  if (width <= 0 || figure.hidden) return; // in a closed group
  const svg = draw(figure, "svg", { height: HEIGHT, role: "img", "aria-label": `${title}${unit && `, ${unit}`}: ${ends(metric)}` });
  const drawn = RUNS.map((run, number) => ({ number, run, curve: run.curves[metric] }))
    .filter(({ number, run, curve }) => curve && !hidden.has(number) && (axis === "iteration" || run.axes[axis]))
    .map((its) => ({ ...its, told: its.curve, curve: placed(its.run, its.curve), smoothed: smooth(its.curve.y) }));
  if (!drawn.length) return;
  const xs = extent(drawn.map(({ curve }) => curve));
  const ys = range(drawn.flatMap(({ curve }) => (curve.per > 1 ? curve.low.concat(curve.high) : curve.y)));
  const scale = axes(svg, width, xs, ys, unit, axis);
  for (const { number, curve, smoothed } of drawn) {
    const color = colorOf(number);
    if (curve.per > 1) draw(svg, "path", { class: `band ${color}`, d: band(curve, scale.x, scale.y) });
    const line = (values, kind) =>
      draw(svg, "path", { class: `curve ${kind} ${color}`, d: path(curve.x, values, scale.x, scale.y) });
    if (smoothing) line(curve.y, "raw");
    line(smoothed, "line");
    curve.y.forEach((value, i) => {
      const lost = curve.per > 1 ? curve.lost[i] : value === null;
      const alone = value !== null && (curve.y[i - 1] ?? null) === null && (curve.y[i + 1] ?? null) === null;
      if (lost) draw(svg, "rect", { class: `lost ${color}`, x: scale.x(curve.x[i]) - 1, y: scale.bottom - 5, width: 2, height: 5 });
      if (alone) draw(svg, "circle", { class: `dot ${color}`, cx: scale.x(curve.x[i]), cy: scale.y(value), r: 2.5 });
    });
  }
  follow(svg, width, xs, scale, (wanted) => {
    const points = drawn.map((its) => ({ ...its, i: nearest(its.curve.x, wanted) }));
    const first = points.reduce((a, b) => (Math.abs(b.curve.x[b.i] - wanted) < Math.abs(a.curve.x[a.i] - wanted) ? b : a));
    const lines = points.map(({ number, run, told: whole, curve, smoothed, i }) => {
      const where = whole.x[i] === first.told.x[first.i] ? "" : ` at ${whole.x[i]}`;
      return [colorOf(number), `${run.label}${where}: ${told(curve, i, smoothed, unit)}`];
    });
    return { x: first.curve.x[first.i], title: `${title}, ${span(first.told, first.i)}`, lines };
  });
}

function buildCurves() {
  const areas = new Map();
  for (const its of DATA.metrics) {
    const area = its.name.includes("/") ? its.name.slice(0, its.name.indexOf("/")) : "other";
    if (!areas.has(area)) areas.set(area, []);
    areas.get(area).push(its);
  }
  for (const [area, metrics] of areas) {
    const count = put(null, "span");
    const box = put(null, "div", { class: "charts" });
    const group = put(byId("groups"), "details", { open: true }, put(null, "summary", {}, `${area} `, count), box);
    group.addEventListener("toggle", () => group.open && later(redraw));
    for (const { name: metric, title, unit } of metrics) {
      const key = put(null, "code", { class: "key" }, ...breakable(metric));
      const figure = put(box, "figure", { class: "chart" }, put(null, "figcaption", {}, put(null, "h3", {}, title), key));
      figure.dataset.metric = metric;
      charts.push({ figure, metric, title, unit, group, count });
    }
  }
}

function buildFlat() {
  const table = byId("flattable");
  put(table, "tr", {}, heading("metric"), heading("name"), ...RUNS.map((run) => heading(RUNS.length > 1 ? run.label : "value")));
  for (const { name: metric, title, unit } of DATA.flat) {
    const key = put(null, "code", { class: "key" }, ...breakable(metric));
    const values = RUNS.map((run) => put(null, "td", { class: "number" }, run.ends[metric] ? valued(run.curves[metric].y[0], unit) : "not there"));
    const row = put(table, "tr", {}, put(null, "td", {}, title), put(null, "td", {}, key), ...values);
    flatRows.push({ row, metric, title });
  }
}

const heading = (text) => put(null, "th", { scope: "col" }, text);

function filter() {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = ({ metric, title }) => words.every((word) => `${metric} ${title}`.toLowerCase().includes(word));
  for (const chart of charts) chart.figure.hidden = !fits(chart);
  for (const flat of flatRows) flat.row.hidden = !fits(flat);
  const flats = flatRows.filter((flat) => !flat.row.hidden).length;
  byId("flat").hidden = flats === 0;
  byId("flatcount").textContent = flats === flatRows.length ? `${flats}` : `${flats} of ${flatRows.length}`;
  for (const group of new Set(charts.map((chart) => chart.group))) {
    const own = charts.filter((chart) => chart.group === group);
    const left = own.filter((chart) => !chart.figure.hidden).length;
    group.hidden = left === 0;
    own[0].count.textContent = left === own.length ? `${left}` : `${left} of ${own.length}`;
  }
  byId("none").hidden = flats > 0 || charts.some((chart) => !chart.figure.hidden);
  later(redraw);
}

function redraw() {
  tip.hidden = true;
  for (const chart of charts) if (chart.group.open && !chart.group.hidden) drawChart(chart);
}

let waiting = false;
function later(what) {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    what();
  });
}

// ---------------------------------------------------------------- runs

function runTitle(run, number) {
  const label = put(null, "b", {}, run.label), swatch = put(null, "i", { class: `swatch ${colorOf(number)}` });
  if (RUNS.length === 1) return put(null, "label", { title: run.path }, label);
  const box = put(null, "input", { type: "checkbox", checked: true, title: "draw the curves of this run" });
  box.addEventListener("change", () => {
    if (box.checked) hidden.delete(number);
    else hidden.add(number);
    later(redraw);
  });
  return put(null, "label", { title: run.path }, box, swatch, label);
}

function scoreTable(parent, scores) {
  const table = put(put(parent, "div", { class: "wide" }), "table", { class: "scores" });
  put(table, "tr", {}, ...["score", "first", "best", "last"].map(heading));
  for (const { metric, title, first, best, best_at, last } of scores) {
    const name = put(null, "th", { scope: "row" }, title, put(null, "code", { class: "key" }, ...breakable(metric)));
    const at = best_at === null ? [] : [put(null, "small", {}, ` iteration ${best_at.toLocaleString("en")}`)];
    const cell = (...text) => put(null, "td", {}, ...text);
    put(table, "tr", {}, name, cell(first), cell(best ?? "not finite", ...at), cell(last));
  }
}

function buildHeads() {
  RUNS.forEach((run, number) => {
    const { state, facts, scores } = run.head;
    const badge = put(null, "span", { class: `state ${state.kind}` }, STATES[state.kind]);
    const card = put(byId("legend"), "li", {}, put(null, "h2", {}, runTitle(run, number), badge));
    put(card, "p", { class: "what" }, state.text);
    const body = put(card, "div", { class: "facts" });
    if (scores.length) scoreTable(body, scores);
    const list = put(body, "dl");
    for (const [name, lines] of facts) {
      const tag = name === "command" ? "code" : "span";
      put(list, "dt", {}, name);
      put(list, "dd", {}, ...lines.map((line) => put(null, tag, { class: "line" }, line)));
    }
    const notes = [...run.notes];
    if (run.per > 1) {
      const count = run.count.toLocaleString("en");
      notes.unshift(`its ${count} iterations are more than a chart has points for: a point is the mean of ${run.per}, and the band around the line reaches from the least to the largest of them`);
    }
    for (const note of notes) put(byId("notes"), "p", { class: "note" }, `${run.label}: ${note}`);
  });
}

// ---------------------------------------------------------------- phases

function phaseChart(parent, run) {
  const names = STACKED.filter((name) => run.curves[name]);
  const first = run.curves[names[0]];
  const values = names.map((name) => {
    const curve = run.curves[name]; // a phase may lack iterations that another has
    const known = new Map(curve.x.map((x, i) => [x, curve.y[i]]));
    return first.x.map((x) => known.get(x) ?? 0);
  });
  const sums = first.x.map((_, i) => values.reduce((sum, its) => sum + its[i], 0));
  const figure = put(parent, "figure", { class: "chart stack" }, put(null, "h3", {}, run.label));
  const keys = put(figure, "div", { class: "keys" });
  names.forEach((name, k) => put(keys, "span", { class: `p${k}` }, put(null, "i"), put(null, "b", {}, NAMES[name])));
  const width = figure.clientWidth - 20;
  const svg = draw(figure, "svg", { height: HEIGHT, role: "img", "aria-label": `phase times of ${run.label}` });
  const xs = extent([first]), scale = axes(svg, width, xs, [0, Math.max(...sums, 1e-9) * 1.04], "s");
  const below = first.x.map(() => 0);
  values.forEach((its, k) => {
    const top = its.map((value, i) => below[i] + value);
    let points = first.x.map((x, i) => [x, below[i], top[i]]);
    if (points.length === 1) points = [[xs[0], ...points[0].slice(1)], [xs[1], ...points[0].slice(1)]];
    const up = points.map(([x, , high]) => `${scale.x(x).toFixed(1)} ${scale.y(high).toFixed(1)}`);
    const down = points.map(([x, low]) => `${scale.x(x).toFixed(1)} ${scale.y(low).toFixed(1)}`).reverse();
    draw(svg, "path", { class: `area p${k}`, d: `M${up.concat(down).join("L")}Z` });
    top.forEach((value, i) => (below[i] = value));
  });
  follow(svg, width, xs, scale, (wanted) => {
    const i = nearest(first.x, wanted);
    const lines = names.map((name, k) => [`p${k}`, `${NAMES[name]}: ${shown(values[k][i])} s`]).reverse();
    return { x: first.x[i], title: `${span(first, i)}: ${shown(sums[i])} s`, lines };
  });
}

function phaseTable(parent, run) {
  const rows = Object.entries(run.curves)
    .filter(([name]) => /^time\/.*_seconds$/.test(name))
    .map(([name, curve]) => {
      const known = curve.y.filter((value) => value !== null);
      return [name.slice(5, -8), known.reduce((a, b) => a + b, 0) / Math.max(known.length, 1)];
    })
    .sort((a, b) => b[1] - a[1]);
  const longest = Math.max(...rows.map((row) => row[1]), 1e-9);
  const table = put(put(parent, "div", { class: "wide" }), "table");
  put(table, "tr", {}, put(null, "th", {}, "phase"), put(null, "th", {}, "mean seconds"), put(null, "th"));
  for (const [name, seconds] of rows) {
    const share = put(null, "span", { class: "share" });
    share.style.width = `${(100 * seconds) / longest}%`;
    const cells = [put(null, "td", {}, ...breakable(name)), put(null, "td", { class: "number" }, shown(seconds)), put(null, "td", { class: "bar" }, share)];
    put(table, "tr", {}, ...cells);
  }
}

function drawPhases() {
  byId("phasecharts").replaceChildren();
  for (const run of RUNS) {
    if (!STACKED.some((name) => run.curves[name])) {
      put(byId("phasecharts"), "p", { class: "hint" }, `${run.label} has no phase times.`);
      continue;
    }
    const box = put(byId("phasecharts"), "div", { class: "phaserun" });
    phaseChart(box, run);
    phaseTable(box, run);
  }
}

// ---------------------------------------------------------------- layout

function choose(number, rank) {
  const { roles, world } = RUNS[number].layout;
  for (const button of document.querySelectorAll(".rank")) {
    button.classList.toggle("chosen", button.dataset.run === String(number) && button.dataset.rank === String(rank));
  }
  const places = roles.flatMap((role) =>
    role.replicas.flatMap((stages, replica) =>
      stages.flatMap((ranks, pp) =>
        ranks.flatMap((its, tp) => (its === rank ? [`${role.name} tp ${tp}, pp ${pp}, ${role.names[replica]}`] : [])),
      ),
    ),
  );
  byId("chosen").textContent = `Rank ${rank} of ${world} in ${RUNS[number].label}: ${places.join("; ") || "nothing"}`;
}

function buildLayouts() {
  RUNS.forEach((run, number) => {
    const parent = byId("layouts");
    const ranks = run.layout && `${run.layout.world} rank${run.layout.world > 1 ? "s" : ""}`;
    put(parent, "h3", {}, run.layout ? `${run.label}: ${ranks}` : `${run.label}: not known, its directory has no layout.json`);
    if (!run.layout) return;
    const cards = put(parent, "div", { class: "roles" });
    for (const role of run.layout.roles) {
      const card = put(cards, "div", { class: "role" }, put(null, "h3", {}, role.name), put(null, "small", {}, role.sizes));
      const replicas = put(card, "div", { class: "replicas" });
      role.replicas.forEach((stages, replica) => {
        const box = put(replicas, "div", { class: "replica" });
        if (role.replicas.length > 1) put(box, "small", {}, role.names[replica]);
        stages.forEach((its, pp) => {
          const row = put(box, "div");
          its.forEach((rank, tp) => {
            const button = put(row, "button", { class: `rank s${pp % 8}`, type: "button", title: `rank ${rank}: tp ${tp}, pp ${pp}` }, String(rank));
            button.dataset.run = number;
            button.dataset.rank = rank;
            button.addEventListener("click", () => choose(number, rank));
          });
        });
      });
    }
  });
}

// ---------------------------------------------------------------- samples

let order = "best";
const ORDERS = {
  best: (a, b) => (b.number ?? -Infinity) - (a.number ?? -Infinity) || 0,
  worst: (a, b) => (a.number ?? Infinity) - (b.number ?? Infinity) || 0,
  prompt: (a, b) => a.prompt.text.localeCompare(b.prompt.text, "en"),
};

function text(parent, title, { text, cut }) {
  const whole = cut ? `${text}\n... ${cut.toLocaleString("en")} more characters` : text;
  put(parent, "small", {}, title);
  const lines = text.split("\n");
  if (text.length <= FOLDED && lines.length <= FOLDED_LINES) return void put(parent, "pre", {}, whole);
  const beginning = put(null, "span", { class: "beginning" }, `${lines.slice(0, 4).join("\n").slice(0, 240)} ...`);
  const summary = put(null, "summary", {}, beginning, put(null, "b", {}, `all ${(text.length + cut).toLocaleString("en")} characters`));
  put(parent, "details", { class: "long" }, summary, put(null, "pre", {}, whole));
}

function groupCard(parent, rows) {
  // all responses to a prompt that the page has, in the chosen order
  const card = put(parent, "article", { class: "sample group" });
  const known = rows.map((row) => row.number).filter((number) => number !== null);
  const mean = known.length ? `, mean score ${shown(known.reduce((a, b) => a + b, 0) / known.length)}` : "";
  put(card, "p", { class: "score" }, `${rows.length} responses${mean}`);
  text(card, "prompt", rows[0].prompt);
  if (rows[0].answer) text(card, "reference answer", rows[0].answer);
  for (const row of rows) text(card, row.score === null ? "response" : `response, score ${row.score}`, row.response);
}

function drawHistogram() {
  const run = RUNS[Number(byId("samplerun").value)], found = run.histogram, parent = byId("histogram");
  parent.replaceChildren();
  if (!found) return;
  const figure = put(parent, "figure", { class: "chart hist" }, put(null, "h3", {}, "Scores of sampled responses"));
  const keys = put(figure, "div", { class: "keys" });
  const halves = [found.first, found.last].slice(0, found.iterations.length);
  found.iterations.forEach(([from, to], k) => put(keys, "span", { class: `p${k}` }, put(null, "i"), put(null, "b", {}, `iterations ${from} to ${to}`)));
  const width = figure.clientWidth - 20, { edges } = found;
  const svg = draw(figure, "svg", { height: HEIGHT, role: "img", "aria-label": `histogram of scores of ${run.label}` });
  const most = Math.max(...halves.flat(), 1);
  const xs = edges[0] < edges[edges.length - 1] ? [edges[0], edges[edges.length - 1]] : [edges[0] - 0.5, edges[0] + 0.5];
  const scale = axes(svg, width, xs, [0, most * 1.04], "samples", "score");
  halves.forEach((counts, k) =>
    counts.forEach((count, i) => {
      const from = counts.length > 1 ? edges[i] : xs[0], to = counts.length > 1 ? edges[i + 1] : xs[1];
      const whole = Math.max(scale.x(to) - scale.x(from) - 2, 1), own = whole / halves.length;
      const bar = draw(svg, "rect", { class: `p${k}`, x: scale.x(from) + 1 + k * own, y: scale.y(count), width: own, height: scale.bottom - scale.y(count) });
      draw(bar, "title", {}, `${shown(edges[i])} to ${shown(edges[i + 1])}: ${count}`);
    }),
  );
}

function sampleCard(parent, row) {
  const card = put(parent, "article", { class: "sample" });
  if (row.score !== null) put(card, "p", { class: "score" }, `score ${row.score}`);
  text(card, "prompt", row.prompt);
  text(card, "response", row.response);
  if (row.answer) text(card, "reference answer", row.answer);
  const more = Object.entries(row.more);
  if (!more.length) return;
  const box = put(card, "details", { class: "more" }, put(null, "summary", {}, `more: ${more.map(([name]) => name).join(", ")}`));
  for (const [name, value] of more) text(box, name, value);
}

function showSamples() {
  const { samples } = RUNS[Number(byId("samplerun").value)];
  const list = byId("samplelist"), slider = byId("sampleat");
  list.replaceChildren();
  slider.disabled = samples.iterations.length < 2;
  slider.max = Math.max(0, samples.iterations.length - 1);
  const at = samples.iterations[Number(slider.value)];
  byId("samplenumber").textContent = at ? at.iteration : "";
  slider.setAttribute("aria-valuetext", at ? `iteration ${at.iteration}` : "none");
  const some = samples.of > samples.iterations.length;
  byId("samplehint").textContent = !at
    ? "There are no samples."
    : (some ? `Of the ${samples.of.toLocaleString("en")} iterations with samples the page has ${samples.iterations.length}, evenly spaced. ` : "") +
      (at.count > at.rows.length ? `The best and the worst ${at.rows.length} of ${at.count} samples of the iteration.` : "");
  for (const heldout of [true, false]) {
    const rows = at ? at.rows.filter((row) => row.heldout === heldout).sort(ORDERS[order]) : [];
    if (!rows.length) continue;
    const what = heldout ? "held-out prompts, greedy responses" : "training prompts";
    put(list, "h3", {}, `Iteration ${at.iteration}: ${what}`);
    const cards = put(list, "div", { class: "cards" });
    const groups = new Map();
    for (const row of rows) groups.set(row.prompt.text, [...(groups.get(row.prompt.text) ?? []), row]);
    for (const group of groups.values()) (group.length > 1 ? groupCard(cards, group) : sampleCard(cards, group[0]));
  }
}

function buildSamples() {
  RUNS.forEach((run, number) => put(byId("samplerun"), "option", { value: number }, run.label));
  const last = () => {
    const count = RUNS[Number(byId("samplerun").value)].samples.iterations.length;
    byId("sampleat").max = Math.max(0, count - 1);
    byId("sampleat").value = Math.max(0, count - 1);
    drawHistogram();
    showSamples();
  };
  byId("samplerun").addEventListener("change", last);
  byId("sampleat").addEventListener("input", showSamples);
  const buttons = [...byId("sampleorder").children];
  for (const button of buttons) {
    button.addEventListener("click", () => {
      order = button.dataset.order;
      for (const each of buttons) each.setAttribute("aria-pressed", String(each === button));
      showSamples();
    });
  }
  last();
}

// ---------------------------------------------------------------- experts

function buildExperts() {
  const mixtures = RUNS.filter((run) => run.experts.length);
  byId("experts").hidden = byId("expertslink").hidden = !mixtures.length;
  const columns = ["layer", "first", "last", "mean", "largest"];
  for (const run of mixtures) {
    if (RUNS.length > 1) put(byId("expertstables"), "h3", {}, run.label);
    const table = put(put(byId("expertstables"), "div", { class: "wide" }), "table");
    put(table, "tr", {}, ...columns.map((name) => put(null, "th", {}, name)));
    for (const row of run.experts) put(table, "tr", {}, ...columns.map((name) => put(null, "td", {}, String(row[name]))));
  }
}

// ---------------------------------------------------------------- config

function buildConfig() {
  const keys = [...new Set(RUNS.flatMap((run) => Object.keys(run.config)))];
  const table = put(put(byId("configtable"), "div", { class: "wide" }), "table");
  put(table, "tr", {}, put(null, "th", {}, "key"), ...RUNS.map((run) => put(null, "th", { class: "value" }, run.label)));
  let count = 0;
  const known = RUNS.some((run) => run.own), owned = new Set(RUNS.flatMap((run) => run.own ?? Object.keys(run.config)));
  for (const key of keys) {
    const values = RUNS.map((run) => (Object.hasOwn(run.config, key) ? run.config[key] : "not there"));
    const differs = new Set(values).size > 1;
    count += differs;
    const cells = values.map((value) => put(null, "td", { class: "value" }, put(null, "code", {}, value)));
    const kind = `${differs ? "differs" : "same"}${owned.has(key) ? "" : " default"}`;
    put(table, "tr", { class: kind }, put(null, "td", {}, put(null, "code", {}, ...breakable(key))), ...cells);
  }
  byId("differlabel").hidden = RUNS.length < 2;
  byId("differlabel").append(` (${count} of ${keys.length} keys)`);
  const apply = () => {
    for (const row of table.querySelectorAll("tr.same, tr.default")) {
      const has = (kind) => row.classList.contains(kind);
      row.hidden = (has("same") && byId("differ").checked) || (has("default") && byId("own").checked);
    }
  };
  byId("ownlabel").hidden = !known;
  byId("ownlabel").append(` (${keys.filter((key) => owned.has(key)).length} of ${keys.length} keys)`);
  byId("own").checked = known && RUNS.length === 1;
  byId("own").addEventListener("change", apply);
  byId("differ").checked = RUNS.length > 1;
  byId("differ").addEventListener("change", apply);
  apply();
}

// ---------------------------------------------------------------- all

buildHeads();
buildCurves();
buildFlat();
filter();
drawPhases();
buildLayouts();
buildExperts();
buildSamples();
buildConfig();
byId("search").addEventListener("input", filter);
for (const option of byId("axis").options) option.disabled = option.value !== "iteration" && !RUNS.some((run) => run.axes[option.value]);
byId("axis").addEventListener("change", () => {
  axis = byId("axis").value;
  later(redraw);
});
byId("smoothing").addEventListener("input", () => {
  smoothing = Number(byId("smoothing").value);
  byId("smoothed").textContent = smoothing.toFixed(2);
  later(redraw);
});
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return; // phones change the height as one scrolls
  width = innerWidth;
  later(() => {
    redraw();
    drawPhases();
    drawHistogram();
  });
});
