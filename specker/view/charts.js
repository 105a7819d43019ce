// Charts over the text: x is the token at which a round begins. uPlot draws them; a table in words is the figure's label.

const RECENT = 32; // rounds that a line of means looks back on, fewer in a short trace

// Means over the last `recent` rounds that have a value.
function smooth(values, recent) {
  const window = [], out = [];
  let sum = 0;
  for (const v of values) {
    if (v !== null) {
      window.push(v);
      sum += v;
      if (window.length > recent) sum -= window.shift();
    }
    out.push(window.length ? sum / window.length : null);
  }
  return out;
}

const mean = (values) => {
  const known = values.filter((v) => v !== null);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
};

// The charts that this trace has data for: { title, unit, series: [[name, values, colour number, dash]] }.
function chartsOf(trace) {
  const rounds = trace.rounds, by = (f) => rounds.map(f);
  const charts = [];
  if (rounds.some((r) => r.draft.length))
    charts.push({ title: "tokens of a round", unit: "",
      series: [["drafted", by((r) => r.draft.length), 2], ["accepted", by((r) => r.accepted), 0]] },
    { title: "acceptance", unit: "%",
      series: [["share accepted", by((r) => (r.draft.length ? (100 * r.accepted) / r.depth : null)), 0]] });
  if (rounds.some((r) => r.exit))
    charts.push({ title: "exit layer", unit: "", raw: true,
      series: [["exit layer", by((r) => (r.draft.length ? r.exit : null)), 1]] });
  if (rounds.some((r) => r.diffusion))
    charts.push({ title: "diffusion block", unit: "", series: [
      ["block length", by((r) => r.diffusion?.[0] ?? null), 2],
      ["lattice width", by((r) => r.diffusion?.[1] ?? null), 1, [6, 3]]] });
  if (rounds.some((r) => r.outside))
    charts.push({ title: "tokens outside the head", unit: "%",
      series: [["share outside", by((r) => (r.tokens.length ? (100 * (r.outside?.length ?? 0)) / r.tokens.length : null)), 1]] });
  const used = trace.stages.map((name, n) => [name, by((r) => r.milliseconds[n]), n]).filter((s) => mean(s[1]) > 0.005);
  charts.push({ title: "time of a round", unit: "ms",
    series: used.map(([name, values, n]) => [name, values, n, DASHES[n]]) });
  return charts;
}

const DASHES = [[], [2, 2], [8, 3], [1, 3], [5, 2, 1, 2], [10, 2]];
const colour = (box, n) => getComputedStyle(box).getPropertyValue(`--line${n % 6}`).trim();
const inWords = (chart) =>
  `${chart.title}: ` + chart.series.map(([n, v]) => `${n} ${mean(v)?.toFixed(2) ?? "unknown"} ${chart.unit} on average`).join(", ");

function drawCharts(box, trace, select) {
  const made = [];
  let chosen = 0, x = [];
  const at = (n) => {
    chosen = n;
    for (const plot of made) plot.setCursor({ left: plot.valToPos(x[n], "x"), top: 20 }, false);
  };
  const draw = () => {
    x = trace.rounds.map((r) => r.at + 1);
    const recent = Math.max(1, Math.min(RECENT, x.length >> 4));
    if (!x.length) return; // a request that waits
    box.style.minHeight = `${box.offsetHeight}px`; // while it is empty: a page that became shorter would scroll
    made.splice(0).forEach((plot) => plot.destroy());
    box.replaceChildren(element("p", "about", `x: new tokens${trace.turns.length > 1 ? " of all prompts, the prompts" : ", the prompt"
      } not counted; y: ${recent > 1 ? `mean of the last ${recent} rounds` : "each round"}`));
    const ink = getComputedStyle(box).getPropertyValue("--ink").trim();
    const grid = getComputedStyle(box).getPropertyValue("--edge").trim();
    const figures = chartsOf(trace).map((chart) => {
      const figure = element("figure", "chart");
      figure.setAttribute("role", "img");
      figure.setAttribute("aria-label", inWords(chart));
      figure.append(element("figcaption", "", `${chart.title}${chart.unit && ` (${chart.unit})`}` +
        (chart.raw && recent > 1 ? ", of each round" : "")));
      box.append(figure);
      return [chart, figure];
    });
    for (const [chart, figure] of figures) { // all are there: their widths are final
      const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid }, font: "12px system-ui" };
      const plot = new uPlot({
        width: Math.max(200, figure.clientWidth), height: 100, padding: [6, null, 0, 0],
        scales: { x: { time: false }, y: { range: (_, low, high) => [Math.min(0, low ?? 0), Math.max(high ?? 1, 1e-3) * 1.1] } },
        cursor: { y: false, drag: { x: false, y: false } },
        axes: [{ ...axis, size: 28 }, { ...axis, size: 48 }],
        series: [{ label: "new token" }, ...chart.series.map(([label, , n, dash]) => ({
          label, stroke: colour(box, n), width: 2, dash, points: { show: x.length === 1 }, spanGaps: true,
          value: (_, v) => (v === null || v === undefined ? "\u2013" : String(Number(v.toFixed(2)))),
        }))],
      }, [x, ...chart.series.map(([, values]) => (chart.raw ? values : smooth(values, recent)))], figure);
      plot.over.addEventListener("click", () => plot.cursor.idx !== null && select(plot.cursor.idx));
      made.push(plot);
    }
    queueMicrotask(() => { // uPlot sets its sizes and scales in one
      box.style.minHeight = "";
      at(chosen);
    });
  };
  let wide = 0;
  new ResizeObserver(() => {
    if (box.clientWidth && box.clientWidth !== wide) {
      wide = box.clientWidth;
      draw();
    }
  }).observe(box);
  return { draw, at };
}
