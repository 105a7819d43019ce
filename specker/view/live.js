// The page of a server: its queue, its requests as a table, and one of them as a section, which grows with it.

const EVERY = 2000; // ms between two looks at the server
const COLUMNS = ["request", "state", "tokens", "acceptance length", "tokens/s", "prompt"];
const OPEN = ["waiting", "prefill", "running"]; // states of a request that has not ended

const follow = element("input"), queue = element("p", "about"), lost = element("p", "about remark");
const rows = new Map(); // of the table, by request
const body = element("tbody");
let current = null; // the request of the section: { id, raw, view }
let wanted = null; // the request that was clicked, unless the page follows the newest

function frame() {
  document.body.classList.add("live");
  document.getElementById("together").hidden = true;
  const label = element("label"), head = element("tr"), top = element("thead"), table = element("table");
  follow.type = "checkbox";
  follow.id = "follow";
  follow.checked = true;
  label.append(follow, " show the newest request");
  document.getElementById("theme").before(label);
  for (const name of COLUMNS) {
    const cell = element("th", "", name);
    cell.scope = "col";
    head.append(cell);
  }
  top.append(head);
  table.append(top, body);
  const box = element("div");
  box.id = "requests";
  box.tabIndex = 0; // it scrolls
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", "Requests, the newest first");
  box.append(table);
  queue.id = "queue";
  lost.id = "lost";
  lost.setAttribute("role", "status");
  document.getElementById("traces").before(queue, lost, box);
}

// Changes only what differs, so that a selection of text stays.
const beginning = (text) => (text.length > 100 ? `${text.slice(0, 100)}\u2026` : text);
const put = (cell, text) => { if (cell.textContent !== text) cell.textContent = text; };
const figure = (x, digits = Number.isInteger(x) ? 0 : 2) => x?.toFixed(digits) ?? "\u2013";

function row(id) {
  const made = element("tr"), button = element("button", "", String(id)), first = element("td");
  button.type = "button";
  button.addEventListener("click", () => {
    follow.checked = false;
    wanted = id;
    showRequest();
  });
  first.append(button);
  made.append(first, ...COLUMNS.slice(1).map(() => element("td")));
  return made;
}

function list({ traces, states }) {
  const ids = new Set(states.map((state) => state.id));
  for (const [id, line] of rows) {
    if (ids.has(id)) continue;
    line.remove();
    rows.delete(id);
  }
  [...states.keys()].reverse().forEach((n, at) => {
    const state = states[n], { prompt } = traces[n].turns[0];
    if (!rows.has(state.id)) rows.set(state.id, row(state.id));
    const line = rows.get(state.id);
    const figures = [figure(state.tokens), figure(state.acceptance_length, 2), figure(state.tokens_per_second, 1)];
    const how = OPEN.includes(state.state) ? state.state : `ended: ${state.state}`;
    [how, ...figures, beginning(prompt)].forEach((text, column) => put(line.children[column + 1], text));
    if (body.children[at] !== line) body.insertBefore(line, body.children[at] ?? null);
  });
}

let seen = given; // the server's last answer

function update(data) {
  seen = data;
  document.title = `Requests of specker: ${data.engine}`;
  put(document.querySelector("h1"), document.title);
  const parts = Object.entries(data.queue).map(([name, value]) => `${name} ${figure(value)}`);
  const left = data.begun - data.traces.length;
  parts.push(!data.begun ? "no request yet" : left ? `${data.traces.length} of ${data.begun} requests are shown` : "");
  put(queue, parts.filter(Boolean).join(", "));
  list(data);
  showRequest();
}

// Show the wanted request; one that the server has dropped stays as it was.
function showRequest() {
  const newest = seen.states.findLast((state) => state.tokens) ?? seen.states.at(-1);
  if (follow.checked && !current?.view.kept) wanted = newest?.id ?? null;
  const n = seen.states.findIndex((state) => state.id === wanted);
  if (n < 0) return;
  const state = seen.states[n], raw = JSON.stringify([seen.traces[n], state.state]);
  const fewer = seen.traces[n].turns[0].rounds.position.length < current?.view.trace.rounds.length; // a new server's
  if (current?.id !== wanted || fewer) {
    document.getElementById("traces").replaceChildren();
    views.length = 0;
    const view = section(copied(raw), 0);
    views.push(view);
    current = { id: wanted, raw, view };
    setRows();
    requestAnimationFrame(() => begin(view));
  } else if (current.raw !== raw) {
    current.raw = raw;
    grow(current.view, copied(raw));
  }
  for (const [id, line] of rows) {
    if (id === wanted) line.setAttribute("aria-current", "true");
    else line.removeAttribute("aria-current");
  }
}

// The trace, which the section adds to.
function copied(raw) {
  const [trace, state] = JSON.parse(raw);
  for (const turn of trace.turns) turn.finished ??= state;
  return trace;
}

function grow(view, trace) {
  unpack(Object.assign(view.trace, trace));
  setRows();
  view.about.replaceChildren(...facts(view.trace));
  view.text.grow(!view.kept);
  const round = view.trace.rounds[view.round], top = view.panel.scrollTop;
  if (round) showRound(view, round);
  else begin(view);
  view.panel.scrollTop = top;
  view.charts.draw();
}

async function ask() {
  const answer = await fetch("view/data", { cache: "no-store", signal: AbortSignal.timeout(5 * EVERY) });
  if (!answer.ok) throw new Error(`${answer.status}`);
  return answer.json();
}

async function look() {
  const data = document.hidden ? seen : await ask().catch(() => null);
  setTimeout(look, EVERY);
  put(lost, data ? "" : "no connection: trying again every two seconds");
  if (data) update(data);
}

frame();
update(given);
setTimeout(look, EVERY);
