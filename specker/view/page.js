// The page: one section per trace with its text, the selected round and the charts.

const given = JSON.parse(document.getElementById("data").textContent); // a list of traces; an object in a live page
const views = [];

const WORDS = { recovered: "recovered: the target's own token where the draft was refused",
  bonus: "bonus: the target's own token after a wholly accepted path",
  own: "the target's own token" };

const SOURCES = { model: "by the draft model", head: "by the head", text: "from this text", past: "from an earlier text",
  corpus: "from the corpus", prediction: "from the prediction" };

// Where a draft comes from, in words.
function origin(r) {
  if (r.exit) return ` by ${r.exit} layers`;
  const words = SOURCES[r.source];
  if (!words) return "";
  return r.matched ? ` ${words} after ${r.matched} matching token${r.matched > 1 ? "s" : ""}` : ` ${words}`;
}

// Columns -> rounds. `at`: tokens of the trace before the round; `where`: [turn, token within the turn].
function unpack(trace) {
  trace.rounds = [];
  let at = 0;
  trace.turns.forEach((turn, number) => {
    const c = turn.rounds, first = at;
    turn.list = c.position.map((position, n) => {
      const draft = c.draft[n], parents = c.parents[n] ?? draft.map((_, j) => j);
      const round = { position, draft, parents, index: trace.rounds.length, number: n + 1, of: c.position.length, at,
        turn: number, within: at - first, tokens: c.tokens[n], pieces: c.pieces[n], accepted: c.accepted[n],
        last: c.last[n], probability: c.probability[n], agreed: c.agreed[n], own: c.own[n], target: c.target[n], path: c.path[n], exit: c.exit[n],
        source: c.source[n], matched: c.matched[n],
        sequences: c.sequences[n], milliseconds: c.milliseconds[n], outside: c.outside[n], diffusion: c.diffusion?.[n] };
      round.depths = depthsOf(parents);
      round.depth = Math.max(...round.depths);
      at += round.tokens.length;
      trace.rounds.push(round);
      return round;
    });
  });
  trace.count = at;
}

function depthsOf(parents) {
  const depths = [0];
  for (const parent of parents) depths.push(depths[parent] + 1);
  return depths;
}

const nameOf = (trace) => `${trace.file}: ${trace.strategy}, ${trace.target}${trace.draft ? ` + ${trace.draft}` : ""}`;

const shown = (trace, token) => {
  const text = trace.names[token];
  return text ? JSON.stringify(text).slice(1, -1).replaceAll('\\"', '"').replaceAll(" ", "\u2423") : `#${token}`;
};

// --- a round in words, for the live region

function inSentences(trace, r) {
  const quote = (token) => `\u201c${trace.names[token] || `id ${token}`}\u201d`;
  const parts = [`Round ${r.number} of ${r.of}.`];
  if (!r.draft.length) parts.push("Nothing was drafted.");
  else parts.push(`${r.draft.length} ${r.matched ? "copied" : "drafted"}${origin(r)}, ${r.accepted} accepted${
    r.accepted ? `: ${r.tokens.slice(0, r.accepted).map(quote).join(" ")}` : ""}.`);
  if (r.accepted < r.tokens.length) parts.push(`Last, ${WORDS[r.last]}: ${quote(r.tokens.at(-1))}.`);
  if (r.outside?.length) parts.push(`${r.outside.length} outside the trimmed head.`);
  return parts.join(" ");
}

// --- the round as a table: the draft tree, depth first

function treeOrder(parents) {
  const children = Array.from({ length: parents.length + 1 }, () => []);
  parents.forEach((parent, j) => children[parent].push(j + 1));
  const order = [], stack = [...children[0]].reverse();
  while (stack.length) {
    const row = stack.pop();
    order.push(row);
    stack.push(...[...children[row]].reverse());
  }
  return order;
}

function verdict(r, row) {
  const onPath = new Set(r.path), parent = r.parents[row - 1];
  if (onPath.has(row)) return ["\u2713\u00a0accepted", "yes"];
  return onPath.has(parent) ? ["\u2717\u00a0refused", "no"] : ["\u2013\u00a0not reached", "off"];
}

function treeTable(trace, r) {
  const table = element("table");
  table.append(element("caption", "", "Draft tree, depth first; p is a token's probability after the one above it."));
  const head = element("tr");
  for (const name of ["depth", "draft token", "draft p", "target p", "target said", "verdict"]) {
    const cell = element("th", "", name);
    cell.scope = "col";
    head.append(cell);
  }
  const body = element("tbody");
  for (const row of treeOrder(r.parents)) body.append(treeRow(trace, r, row));
  const top = element("thead");
  top.append(head);
  table.append(top, body);
  return table;
}

function treeRow(trace, r, row) {
  const [words, kind] = verdict(r, row);
  const line = element("tr", kind), token = element("td", "token");
  const indent = element("span", "indent", r.depths[row] > 1 ? "\u2514\u00a0" : "");
  indent.style.setProperty("--depth", (r.depths[row] - 1) * Math.min(1, 8 / r.depth));
  token.append(indent, element("code", "", shown(trace, r.draft[row - 1])));
  const said = element("td", "said"), parent = r.parents[row - 1];
  if (kind === "off") said.textContent = "\u2013";
  else said.append(element("code", "", shown(trace, r.target[parent])), r.own ? ` ${decimals(r.own[parent])}` : "");
  line.append(element("td", "", String(r.depths[row])), token, chanceCell(r.probability?.[row - 1]),
    chanceCell(r.agreed?.[row - 1]), said, element("td", "verdict", words));
  return line;
}

const decimals = (p) => p.toFixed(p < 0.1 ? 3 : 2);

function chanceCell(p) {
  const cell = element("td", "chance");
  if (p === undefined) cell.textContent = "\u2013";
  else {
    const bar = element("span", "bar");
    bar.style.setProperty("--p", p);
    cell.append(bar, ` ${decimals(p)}`);
  }
  return cell;
}

function pathLine(trace, r) {
  const line = element("p", "path");
  line.append("committed: ");
  r.tokens.forEach((token, n) => {
    const outside = r.outside?.includes(n) ? " outside" : "";
    line.append(element("span", `t ${n < r.accepted ? "accepted" : r.last}${outside}`, shown(trace, token)), " ");
  });
  return line;
}

function details(trace, r) {
  const parts = trace.stages.map((name, n) => [name, r.milliseconds[n]]).filter(([, ms]) => ms > 0)
    .map(([name, ms]) => `${name} ${ms.toFixed(2)} ms`);
  if (r.sequences > 1) parts.push(`shared by ${r.sequences} sequences`);
  if (r.draft.length && origin(r)) parts.push(`${r.matched ? "copied" : "drafted"}${origin(r)}`);
  if (r.diffusion) parts.push(`block ${r.diffusion[0]}, lattice width ${r.diffusion[1]}, path score ${r.diffusion[2]}`);
  return element("p", "details", parts.join(", "));
}

// Tokens count from 1.
const counted = (before, n) => (n === 1 ? `token ${before + 1}` : `tokens ${before + 1} to ${before + n}`);

function place(trace, r) {
  const turn = trace.turns.length > 1 ? `${trace.turns[r.turn].title}. ` : "";
  return `${turn}Counted from the start of the prompt: ${counted(r.position, r.tokens.length)}.`;
}

function showRound(view, r) {
  const { trace, panel } = view;
  panel.replaceChildren(element("h3", "", `Round ${r.number} of ${r.of}: new ${counted(r.within, r.tokens.length)}`),
    element("p", "details", place(trace, r)), pathLine(trace, r));
  if (r.draft.length) panel.append(treeTable(trace, r));
  else panel.append(element("p", "", "Nothing was drafted: the token is the target's own."));
  panel.append(details(trace, r));
}

// --- selecting

// The round of `view` that covers the same token of the same turn as round `r` of another trace.
function sameTurn(view, r) {
  const list = view.trace.turns[r.turn]?.list;
  if (!list) return null;
  let low = 0, high = list.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (list[middle].within <= r.within) low = middle;
    else high = middle - 1;
  }
  return list[low];
}

function show(view, r, speak) {
  view.round = r.index;
  view.text.mark(r.index);
  showRound(view, r);
  view.charts.at(r.index);
  if (speak) view.live.textContent = inSentences(view.trace, r);
}

// `how`: "hover" shows, "key" and "click" also scroll the round into view and speak.
function select(view, index, how) {
  const r = view.trace.rounds[Math.max(0, Math.min(view.trace.rounds.length - 1, index))];
  if (!r) return; // a request that waits
  show(view, r, how !== "hover");
  if (how !== "hover") view.text.reveal(r.index);
  if (!document.getElementById("linked").checked) return;
  for (const other of views) {
    const found = other === view ? null : sameTurn(other, r);
    if (!found) continue;
    show(other, found, false);
    if (how !== "hover") other.text.reveal(found.index);
  }
}

const STEPS = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, PageDown: 100, PageUp: -100,
  Home: -Infinity, End: Infinity };

function listen(view, box) {
  const under = (event) => event.target.closest?.("[data-round]")?.dataset.round;
  box.addEventListener("pointermove", (event) => {
    const round = under(event);
    if (round !== undefined && !view.kept && Number(round) !== view.round) select(view, Number(round), "hover");
  });
  box.addEventListener("click", (event) => {
    const round = under(event);
    if (round === undefined) return;
    view.kept = true;
    select(view, Number(round), "click");
  });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") view.kept = false;
    if (event.altKey || event.ctrlKey || event.metaKey || !(event.key in STEPS)) return;
    event.preventDefault();
    view.kept = true;
    const from = view.round ?? 0;
    select(view, from + STEPS[event.key], "key");
  });
}

// --- the sections

function summary(trace) {
  const drafted = trace.rounds.reduce((n, r) => n + r.draft.length, 0);
  const accepted = trace.rounds.reduce((n, r) => n + r.accepted, 0);
  const own = `${trace.count} new tokens in ${trace.rounds.length} rounds on ${trace.device}`;
  return drafted ? `${own}; ${drafted} drafted, ${accepted} accepted; acceptance length ${
    (1 + accepted / trace.rounds.length).toFixed(2)}` : own;
}

const facts = (trace) => [element("p", "about", summary(trace)),
  ...trace.remarks.map((remark) => element("p", "about remark", remark))];

function section(trace, number) {
  unpack(trace);
  const part = element("section");
  const title = element("h2", "", nameOf(trace));
  title.id = `title${number}`;
  part.setAttribute("aria-labelledby", title.id);
  const box = element("div", "text"), panel = element("div", "panel"), charts = element("div", "charts");
  const live = element("p", "spoken");
  live.setAttribute("aria-live", "polite");
  box.tabIndex = 0;
  box.setAttribute("role", "application");
  box.setAttribute("aria-label", `Text of ${trace.strategy}: arrow keys move between rounds`);
  box.setAttribute("aria-describedby", "help");
  const options = element("details");
  options.append(element("summary", "", "options"), element("p", "", Object.entries(trace.settings)
    .map(([name, value]) => `${name} ${value}`).join(", ")));
  const below = element("div", "below");
  panel.tabIndex = 0; // it scrolls
  panel.setAttribute("role", "region");
  panel.setAttribute("aria-label", `Selected round of ${trace.strategy}`);
  below.append(panel, charts);
  const about = element("div");
  about.append(...facts(trace));
  part.append(title, about, options, box, live, below);
  document.getElementById("traces").append(part);
  const view = { trace, about, panel, live, round: null, kept: false };
  view.text = new TextView(box, trace);
  view.charts = drawCharts(charts, trace, (n) => { view.kept = true; select(view, n, "click"); });
  listen(view, box);
  return view;
}

function theme() {
  const button = document.getElementById("theme"), dark = matchMedia("(prefers-color-scheme: dark)");
  const set = (isDark) => {
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
    button.textContent = isDark ? "Light" : "Dark";
    button.setAttribute("aria-label", `Use ${isDark ? "light" : "dark"} colours`);
    for (const view of views) view.charts.draw();
  };
  button.addEventListener("click", () => set(document.documentElement.dataset.theme !== "dark"));
  dark.addEventListener("change", () => set(dark.matches));
  set(dark.matches);
}

// Height of the panels: that of the largest draft.
function setRows() {
  const longest = (most, r) => Math.max(most, r.draft.length);
  document.body.style.setProperty("--rows", views.reduce((most, view) => view.trace.rounds.reduce(longest, most), 0));
}

// An empty table shows nothing: begin with the first draft.
const begin = (view) => select(view, Math.max(0, view.trace.rounds.findIndex((r) => r.draft.length)), "hover");

function showTraces(traces) {
  document.title = traces.map(nameOf).join(" | ");
  document.querySelector("h1").textContent = traces.length > 1 ? `Rounds of ${traces.length} traces` : document.title;
  document.getElementById("together").hidden = traces.length < 2;
  traces.forEach((trace, number) => views.push(section(trace, number)));
  setRows();
  requestAnimationFrame(() => [...views].reverse().forEach(begin)); // the first trace's round is the selected one
}

theme();
if (Array.isArray(given)) showTraces(given);
