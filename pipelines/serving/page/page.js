// The live page: lists streams, follows one, and redraws when the service says that rows were committed.
"use strict";

const $ = (id) => document.getElementById(id);
const state = { stream: null, rows: [], forecast: null, cursor: null, about: null, follow: null, alarms: [], span: 192, drawn: false };
const KEPT = 600;

// The service.

let token = sessionStorage.getItem("token");

async function ask(path, options = {}) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const answer = await fetch(path, { ...options, headers, cache: "no-store" });
  if (answer.status === 401) { $("token-form").hidden = false; throw new Error("a token is needed"); }
  if (!answer.ok) throw new Error((await answer.json()).error);
  $("token-form").hidden = true;
  return answer;
}

const get = async (path) => (await ask(path)).json();
const stream = (name, what) => `/v1/streams/${encodeURIComponent(name)}/${what}`;

// Words and numbers.

function number(v, digits = 4) {
  if (v === null || v === undefined) return "–";
  return Math.abs(v) >= 1e5 || (v !== 0 && Math.abs(v) < 1e-3) ? v.toExponential(2) : String(Number(v.toPrecision(digits)));
}
const percent = (v) => (v === null || v === undefined || Number.isNaN(v) ? "–" : `${(100 * v).toFixed(1)} %`);
const whole = (v) => (v === undefined ? "–" : v.toLocaleString("en"));
function time(ds, short = false) {
  if (typeof ds === "number") return String(ds);
  return short ? ds.slice(5, 16).replace("T", " ") : ds.slice(0, 16).replace("T", " ");
}
function ago(seconds) {
  if (!seconds) return "before the start";
  const s = Math.max(0, Date.now() / 1000 - seconds);
  return s < 60 ? `${Math.round(s)} s ago` : s < 3600 ? `${Math.round(s / 60)} min ago` : s < 86400 ? `${Math.round(s / 3600)} h ago` : `${Math.round(s / 86400)} d ago`;
}

// What one row had been expected to be, from the row before it.
function expected(rows, i) {
  const before = rows[i - 1];
  return before && before.next_ds === rows[i].ds ? before : null;
}

// Drawing.

function draw() {
  const rows = state.rows.slice(-state.span), ahead = state.forecast;
  const from = state.rows.length - rows.length;
  const steps = ahead && rows.length && ahead.origin === rows[rows.length - 1].ds ? ahead.ds.length : 0;
  const levels = steps ? Object.keys(ahead.quantiles).map(Number).sort((a, b) => a - b) : [];
  const q = (level) => ahead.quantiles[String(level)];
  const middle = levels.length ? levels[Math.floor(levels.length / 2)] : null;
  const was = rows.map((_, i) => expected(state.rows, from + i));
  const box = $("chart");
  if (!rows.length) { box.replaceChildren(); box.setAttribute("aria-label", "No rows yet"); return; }
  const values = rows.map((r) => r.y).concat(was.flatMap((w) => (w ? [w.next_low, w.next_high] : [])));
  const outer = steps ? [...q(levels[0]), ...q(levels[levels.length - 1]), ...ahead.low, ...ahead.high] : [];
  // One wild interval of a cold memory must not flatten everything: the actuals, and what is near them, decide.
  const [calmLow, calmHigh] = extent(rows.map((r) => r.y).concat(steps ? q(middle) : []), 0.5);
  const [low, high] = extent(values.concat(outer).filter((v) => known(v) && v >= calmLow && v <= calmHigh));
  const f = frame(box, { count: rows.length + steps, low, high, format: (v) => number(v, 6), bottom: 24 });
  const clip = node("clipPath", { id: "inside" }, f.svg);
  node("rect", { x: f.left, y: f.top, width: f.width - f.left - f.right, height: f.height - f.top - f.bottom }, clip);
  const layer = node("g", { "clip-path": "url(#inside)" }, f.svg);

  node("path", { class: "a-past", d: area(was.map((w, i) => [f.x(i), w ? f.y(w.next_low) : null, w ? f.y(w.next_high) : null])) }, layer);
  if (steps) {
    const at = (h) => f.x(rows.length + h), last = rows[rows.length - 1], join = [f.x(rows.length - 1), f.y(last.y)];
    for (let i = 0; i < Math.floor(levels.length / 2); i++) {
      const [a, b] = [q(levels[i]), q(levels[levels.length - 1 - i])];
      node("path", { class: "a-outer", d: area(ahead.ds.map((_, h) => [at(h), f.y(a[h]), f.y(b[h])])) }, layer);
    }
    node("path", { class: "a-band", d: area(ahead.ds.map((_, h) => [at(h), f.y(ahead.low[h]), f.y(ahead.high[h])])) }, layer);
    node("path", { class: "l-forecast", d: path([join, ...ahead.ds.map((_, h) => [at(h), f.y(q(middle)[h])])]) }, layer);
    node("line", { class: "now", x1: join[0], x2: join[0], y1: f.top, y2: f.height - f.bottom }, f.svg);
  }
  node("path", { class: "l-expected", d: path(was.map((w, i) => [f.x(i), w ? f.y(w.next_mid) : null])) }, layer);
  node("path", { class: "l-actual", d: path(rows.map((r, i) => [f.x(i), f.y(r.y)])) }, layer);
  rows.forEach((r, i) => {
    if (i && r.model !== rows[i - 1].model) {
      node("line", { class: "m-change", x1: f.x(i), x2: f.x(i), y1: f.top, y2: f.height - f.bottom }, f.svg);
      node("text", { x: f.x(i) + 5, y: f.top + 10 }, f.svg).textContent = `version ${r.model.split("/").pop()}`;
    }
    if (r.alarms.length) {
      node("line", { class: "l-alarm", x1: f.x(i), x2: f.x(i), y1: f.top, y2: f.height - f.bottom }, layer);
      const mark = node("circle", { class: "m-alarm", cx: f.x(i), cy: f.y(known(r.y) ? r.y : high) ?? f.top, r: 5 }, layer);
      node("title", {}, mark).textContent = `${r.alarms.join(", ")} at ${time(r.ds)}`;
    }
  });
  const last = rows[rows.length - 1];
  if (known(last.y)) node("circle", { class: "m-point", cx: f.x(rows.length - 1), cy: f.y(last.y), r: 4 }, layer);
  const every = Math.max(1, Math.round((rows.length + steps) / Math.max(2, Math.floor(f.width / 130))));
  for (let i = 0; i < rows.length + steps; i += every) {
    const ds = i < rows.length ? rows[i].ds : ahead.ds[i - rows.length];
    node("text", { x: f.x(i), y: f.height - 5, "text-anchor": i ? "middle" : "start" }, f.svg).textContent = time(ds, true);
  }
  const next = steps ? `; expected next ${number(q(middle)[0])}, between ${number(ahead.low[0])} and ${number(ahead.high[0])}` : "";
  box.setAttribute("aria-label", `${state.stream}: last value ${number(last.y)} at ${time(last.ds)}${next}`);
  drawCursor(f, rows, steps, middle, from);
  small("surprise", rows, (r) => r.surprise, 0);
  small("norm", rows, (r) => r.norm, null);
  state.drawn = true;
}

function drawCursor(f, rows, steps, middle, from) {
  const i = state.cursor === null ? null : Math.min(state.cursor, rows.length + steps - 1);
  if (i !== null) node("line", { class: "cursor", x1: f.x(i), x2: f.x(i), y1: f.top, y2: f.height - f.bottom }, f.svg);
  const at = i === null ? rows.length - 1 : i;
  if (at < rows.length) {
    const r = rows[at], w = expected(state.rows, from + at);
    const was = w ? ` · expected ${number(w.next_mid)} (${number(w.next_low)} to ${number(w.next_high)})` : "";
    $("readout").textContent = `${time(r.ds)} · ${r.y === null ? "missing" : number(r.y)}${was}${r.alarms.length ? ` · ${r.alarms.join(", ")}` : ""}`;
  } else {
    const h = at - rows.length, a = state.forecast;
    $("readout").textContent = `${time(a.ds[h])} · forecast ${number(a.quantiles[String(middle)][h])} (${number(a.low[h])} to ${number(a.high[h])})`;
  }
}

function small(id, rows, value, floor) {
  const values = rows.map(value), now = [...values].reverse().find(known);
  let [low, high] = extent(values, 0.08);
  if (floor !== null) low = floor;
  const f = frame($(id), { count: rows.length, low, high, left: 40, bottom: 6, lines: 3, format: (v) => number(v, 4) });
  node("path", { class: "a-small", d: area(values.map((v, i) => [f.x(i), f.y(v), f.height - f.bottom])) }, f.svg);
  node("path", { class: "l-small", d: path(values.map((v, i) => [f.x(i), f.y(v)])) }, f.svg);
  $(`${id}-now`).textContent = number(now, 3);
  $(id).setAttribute("aria-label", `${id === "norm" ? "Memory norm" : "Surprise"} now ${number(now, 3)}, highest ${number(Math.max(...values.filter(known)), 3)}`);
}

function table() {
  const rows = state.rows, body = $("rows");
  body.replaceChildren();
  for (let i = rows.length - 1; i >= Math.max(0, rows.length - 24); i--) {
    const w = expected(rows, i), line = document.createElement("tr");
    const cells = [time(rows[i].ds), number(rows[i].y, 6), w ? number(w.next_mid, 6) : "", w ? `${number(w.next_low)} to ${number(w.next_high)}` : "",
      number(rows[i].surprise, 3), rows[i].alarms.join(", ")];
    for (const text of cells) { const cell = document.createElement("td"); cell.textContent = text; line.append(cell); }
    body.append(line);
  }
}

function item(head, side, text) {
  const made = document.createElement("li"), bold = document.createElement("b"), note = document.createElement("small");
  for (const part of [head, side]) { const span = document.createElement("span"); span.textContent = part; bold.append(span); }
  note.textContent = text;
  made.append(bold, note);
  return made;
}

function alarms() {
  const shown = state.alarms.slice(-6).reverse();
  $("last-alarms").replaceChildren(...shown.map((r) => item(r.alarms.join(", "), number(r.y), time(r.ds))));
  $("no-alarms").hidden = shown.length > 0;
}

// What is told.

function vitals(about) {
  state.about = about;
  $("model").textContent = about.model;
  $("version").textContent = `version ${about.version}`;
  $("promoting").hidden = about.promoting === null;
  $("promoting").textContent = `version ${about.promoting} is warming up`;
  const c = about.counters;
  $("received").textContent = whole(c.received || 0);
  $("alarms").textContent = whole(c.alarms || 0);
  $("coverage").textContent = c.judged ? percent(c.covered / c.judged) : "–";
  $("waiting").textContent = whole(about.waiting);
  health(about.ready ? "well" : "ill", about.ready ? "well" : "not ready");
  const reigns = [...about.champions].reverse().slice(0, 6);
  $("champions").replaceChildren(...reigns.map((r, i) => item(`version ${r.version}`, i ? "" : "live", `${ago(r.since)} · ${r.why}`)));
  $("trouble").hidden = !about.trouble;
  $("trouble").textContent = about.trouble || "";
  const s = about.shadow;
  $("shadow").hidden = !s;
  if (s) {
    const each = (v) => (s.rows ? v / s.rows : null);
    $("shadow-model").textContent = s.model;
    $("shadow-rows").textContent = s.rows ? `on the same ${whole(s.rows)} rows, one step ahead${s.behind ? `; ${whole(s.behind)} rows behind` : ""}` : `catching up, ${whole(s.behind)} rows behind`;
    $("live-error").textContent = number(each(s.live_error)); $("shadow-error").textContent = number(each(s.error));
    $("live-covered").textContent = percent(each(s.live_covered)); $("shadow-covered").textContent = percent(each(s.covered));
  }
}

function health(kind, text) {
  $("health").className = kind;
  $("health-text").textContent = text;
}

let listed = [];

function list() {
  const wanted = $("find").value.toLowerCase();
  const shown = listed.filter((s) => s.unique_id.toLowerCase().includes(wanted)), box = $("streams");
  $("count").textContent = listed.length ? String(listed.length) : "";
  $("no-streams").hidden = listed.length > 0;
  const have = new Map([...box.children].map((li) => [li.firstChild.dataset.name, li]));
  box.replaceChildren(...shown.map((s) => have.get(s.unique_id) || entry(s.unique_id)));
  shown.forEach((s, i) => {
    const button = box.children[i].firstChild;
    button.setAttribute("aria-current", String(s.unique_id === state.stream));
    const [name, value, small] = button.children;
    name.textContent = s.unique_id;
    value.textContent = number(s.y ?? null);
    small.firstChild.textContent = s.seen ? ago(s.seen) : s.last ? time(s.last, true) : "no row yet";
    small.lastChild.textContent = s.alarms ? `${s.alarms} alarm${s.alarms > 1 ? "s" : ""}` : s.surprise === null || s.surprise === undefined ? "" : `surprise ${number(s.surprise, 2)}`;
    small.lastChild.className = s.alarms ? "alarmed" : "";
  });
}

function entry(name) {
  const made = document.createElement("li"), button = document.createElement("button");
  button.type = "button";
  button.dataset.name = name;
  const small = document.createElement("small");
  small.append(document.createElement("span"), document.createElement("span"));
  button.append(document.createElement("b"), document.createElement("span"), small);
  button.addEventListener("click", () => choose(name));
  made.append(button);
  return made;
}

// Following.

async function choose(name) {
  state.follow?.abort();
  state.stream = name;
  state.cursor = null;
  location.hash = encodeURIComponent(name);
  $("stream-title").textContent = name;
  list();
  const follow = (state.follow = new AbortController());
  await refill(name);
  watch(name, follow);
}

async function refill(name) {
  const [past, forecast, alarmed] = await Promise.all([
    get(`${stream(name, "history")}?limit=${KEPT}`), get(stream(name, "forecast")).catch(() => null), get(`${stream(name, "anomalies")}?limit=6`)]);
  if (state.stream !== name) return;
  state.rows = past.rows; state.forecast = forecast; state.alarms = alarmed.rows;
  draw(); table(); alarms();
}

// Server-sent events by fetch, because only fetch can carry a token.
async function watch(name, follow) {
  while (!follow.signal.aborted) {
    try {
      const answer = await ask(`/v1/live?stream=${encodeURIComponent(name)}`, { signal: follow.signal });
      await refill(name);  // what came between the last look and this connection
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let text = ""; ;) {
        const { value, done } = await reader.read();
        if (done) break;
        text += value;
        for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) told(text.slice(0, end));
      }
    } catch (error) {
      if (follow.signal.aborted) return;
      health("ill", "not reached");
    }
    await new Promise((after) => setTimeout(after, 1000));
  }
}

function told(event) {
  const line = event.split("\n").find((l) => l.startsWith("data: "));
  if (!line) return;
  const data = JSON.parse(line.slice(6));
  $("waiting").textContent = whole(data.waiting);
  $("received").textContent = whole(data.received);
  if (!data.rows) return;
  const last = state.rows.length ? state.rows[state.rows.length - 1].ds : null;
  const fresh = last === null ? data.rows : data.rows.filter((r) => r.ds > last);
  state.rows = state.rows.concat(fresh).slice(-KEPT);
  state.forecast = data.forecast;
  const alarmed = fresh.filter((r) => r.alarms.length);
  if (alarmed.length) {
    state.alarms = state.alarms.concat(alarmed);
    alarms();
    $("announce").textContent = alarmed.map((r) => `Alarm: ${r.alarms.join(", ")} at ${time(r.ds)}`).join("; ");
  }
  requestAnimationFrame(() => { draw(); if (document.querySelector("details").open) table(); });
}

async function look() {
  try {
    const [about, found] = await Promise.all([get("/v1/service"), get("/v1/streams?limit=1000")]);
    vitals(about);
    listed = found.streams;
    list();
    const asked = decodeURIComponent(location.hash.slice(1));
    if (state.stream === null && listed.length) choose(listed.some((s) => s.unique_id === asked) ? asked : listed[0].unique_id);
  } catch (error) {
    health("ill", error.message === "a token is needed" ? "token needed" : "not reached");
  }
}

// Hands.

$("chart").addEventListener("keydown", (event) => {
  const total = Math.min(state.rows.length, state.span) + (state.forecast ? state.forecast.ds.length : 0);
  const at = state.cursor === null ? Math.min(state.rows.length, state.span) - 1 : state.cursor;
  const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: total - 1, PageUp: at - 24, PageDown: at + 24 }[event.key];
  if (event.key === "Escape") state.cursor = null;
  else if (to === undefined) return;
  else state.cursor = Math.max(0, Math.min(total - 1, to));
  event.preventDefault();
  $("readout").setAttribute("aria-live", "polite");
  draw();
});
$("chart").addEventListener("blur", () => $("readout").setAttribute("aria-live", "off"));
$("chart").addEventListener("pointermove", (event) => {
  const box = $("chart").getBoundingClientRect(), total = Math.min(state.rows.length, state.span) + (state.forecast ? state.forecast.ds.length : 0);
  state.cursor = Math.max(0, Math.min(total - 1, Math.round(((event.clientX - box.left - 48) / (box.width - 58)) * (total - 1))));
  draw();
});
$("chart").addEventListener("pointerleave", () => { state.cursor = null; draw(); });
$("span").addEventListener("change", (event) => { state.span = Number(event.target.value); state.cursor = null; draw(); });
$("find").addEventListener("input", list);
$("streams").addEventListener("keydown", (event) => {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step) return;
  const buttons = [...$("streams").querySelectorAll("button")], next = buttons[buttons.indexOf(document.activeElement) + step];
  if (next) { next.focus(); event.preventDefault(); }
});
$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  token = $("token").value.trim();
  sessionStorage.setItem("token", token);
  look().then(() => { $("token-error").textContent = $("token-form").hidden ? "" : "This token is not known here."; });
});
$("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme === "dark" ||
    (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("theme", document.documentElement.dataset.theme);
});
if (localStorage.getItem("theme")) document.documentElement.dataset.theme = localStorage.getItem("theme");
new ResizeObserver(() => state.rows.length && draw()).observe($("chart"));
document.querySelector("details").addEventListener("toggle", table);
$("rows") && look();
setInterval(look, 2000);
