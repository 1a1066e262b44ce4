// Small charts in SVG, drawn from data as a whole each time: some hundred points, ten times a second at most.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

function node(name, attributes, parent) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (parent) parent.append(made);
  return made;
}

// Round steps (1, 2, 5 times a power of ten) that cut [low, high] into about `count` parts.
function ticks(low, high, count) {
  const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 5, 10].find((m) => m * power >= raw) || 10);
  const out = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-9; v += step) out.push(Number(v.toPrecision(12)));
  return out;
}

const known = (v) => v !== null && v !== undefined && Number.isFinite(v);

// A line that is broken where a value is missing.
function path(points) {
  let out = "", pen = false;
  for (const [x, y] of points) {
    if (known(y)) { out += `${pen ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`; pen = true; } else pen = false;
  }
  return out;
}

// The area between two lines over the same x; one piece for each run of known values.
function area(points) {
  let out = "", run = [];
  const close = () => {
    if (run.length > 1) {
      out += path(run.map((p) => [p[0], p[1]])) + run.reverse().map((p) => `L${p[0].toFixed(1)} ${p[2].toFixed(1)}`).join("") + "Z";
    }
    run = [];
  };
  for (const p of points) { if (known(p[1]) && known(p[2])) run.push(p); else close(); }
  close();
  return out;
}

// frame(box, {count, low, high, left, bottom, format}) -> {svg, x(i), y(v), width, height}: axes and scales for `count` places.
function frame(box, { count, low, high, left = 48, bottom = 20, right = 10, top = 8, lines = 5, format }) {
  const width = Math.max(box.clientWidth, 120), height = Math.max(box.clientHeight, 60);
  const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true", preserveAspectRatio: "none" });
  const x = (i) => left + ((width - left - right) * i) / Math.max(count - 1, 1);
  const y = (v) => (known(v) ? top + (height - top - bottom) * (1 - (v - low) / (high - low || 1)) : null);
  for (const v of ticks(low, high, lines)) {
    node("line", { class: "grid", x1: left, x2: width - right, y1: y(v), y2: y(v) }, svg);
    node("text", { x: left - 8, y: y(v) + 4, "text-anchor": "end" }, svg).textContent = format(v);
  }
  box.replaceChildren(svg);
  return { svg, x, y, width, height, left, right, top, bottom };
}

function extent(values, pad = 0.06) {
  const real = values.filter(known);
  if (!real.length) return [0, 1];
  const low = Math.min(...real), high = Math.max(...real), room = (high - low || Math.abs(high) || 1) * pad;
  return [low - room, high + room];
}
