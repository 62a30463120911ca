// Draws the rows of the page's JSON on a canvas. A bar is [rank, start_s, end_s, kind, slice, short label, label, action].
"use strict";
const data = JSON.parse(document.getElementById("rows").textContent);
const byId = (id) => document.getElementById(id);
const canvas = byId("canvas"), tip = byId("tip"), pen = canvas.getContext("2d");
const rowHeight = 44, barHeight = 34, leftMargin = 118, axisHeight = 34;
const byRank = Array.from({ length: data.ranks }, () => []);
for (const bar of data.bars) byRank[bar[0]].push(bar);
for (const bars of byRank) bars.sort((a, b) => a[1] - b[1]);
const whole = Math.max(data.duration_s, 1e-9);
let view = { start: 0, end: whole }, hovered = null, dragged = null;

function unitOf(seconds) {
  return seconds >= 1 ? ["s", 1] : seconds >= 1e-3 ? ["ms", 1e3] : ["µs", 1e6];
}
function timeText(seconds) {
  const [name, factor] = unitOf(seconds);
  return `${Number((seconds * factor).toPrecision(4))} ${name}`;
}
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const plotWidth = () => Math.max(50, canvas.clientWidth - leftMargin - 6);
const toX = (time) => leftMargin + ((time - view.start) / (view.end - view.start)) * plotWidth();
const toTime = (x) => view.start + ((x - leftMargin) / plotWidth()) * (view.end - view.start);

function hatch(ground, line) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const ink = tile.getContext("2d");
  ink.fillStyle = ground; ink.fillRect(0, 0, 8, 8);
  ink.strokeStyle = line; ink.lineWidth = 1;
  ink.beginPath(); ink.moveTo(-2, 10); ink.lineTo(10, -2); ink.moveTo(-2, 2); ink.lineTo(2, -2); ink.moveTo(6, 10); ink.lineTo(10, 6);
  ink.stroke();
  return pen.createPattern(tile, "repeat");
}

function draw() {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = data.ranks * rowHeight + axisHeight;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  const font = getComputedStyle(document.body).fontFamily, text = variable("--text"), muted = variable("--muted");
  const panel = variable("--panel"), idle = hatch(variable("--idle"), variable("--hatch"));
  drawAxis(font, muted, variable("--rule"));
  for (let rank = 0; rank < data.ranks; rank++) {
    const top = rank * rowHeight + (rowHeight - barHeight) / 2;
    pen.textAlign = "left"; pen.textBaseline = "middle";
    pen.font = `13px ${font}`; pen.fillStyle = text;
    pen.fillText(`rank ${rank}`, 0, top + barHeight / 2);
    pen.font = `11.5px ${font}`; pen.fillStyle = muted; pen.textAlign = "right";
    pen.fillText(`${(100 * data.idle[rank]).toFixed(0)} % idle`, leftMargin - 12, top + barHeight / 2);
    pen.save();
    pen.beginPath(); pen.rect(leftMargin, top - 2, plotWidth(), barHeight + 4); pen.clip();
    pen.fillStyle = idle;
    pen.fillRect(toX(0), top, toX(whole) - toX(0), barHeight);
    for (const bar of byRank[rank]) if (bar[3] !== "wait") drawBar(bar, top, font, panel, text);
    pen.restore();
  }
}

function drawBar(bar, top, font, panel, text) {
  const left = toX(bar[1]), width = toX(bar[2]) - left;
  if (left + width < leftMargin || left > leftMargin + plotWidth()) return;
  const edge = width > 6 ? 1 : width > 2.5 ? 0.5 : 0;      // the gap between bars, gone when they get thin
  pen.fillStyle = data.shades[bar[3]][bar[4]];
  pen.beginPath();
  pen.roundRect(left + edge / 2, top, Math.max(width - edge, 0.6), barHeight, width > 12 ? 4 : 0);
  pen.fill();
  if (bar === hovered) { pen.strokeStyle = text; pen.lineWidth = 2; pen.stroke(); }
  pen.font = `600 11px ${font}`;
  const seenLeft = Math.max(left, leftMargin), seenRight = Math.min(left + width, leftMargin + plotWidth());
  const room = seenRight - seenLeft, label = room > pen.measureText(bar[6]).width + 22 ? bar[6] : bar[5];
  if (room < pen.measureText(label).width + 3) return;
  pen.fillStyle = data.text[bar[3]]; pen.textAlign = "center"; pen.textBaseline = "middle";
  pen.fillText(label, (seenLeft + seenRight) / 2, top + barHeight / 2 + 0.5);
}

function drawAxis(font, muted, rule) {
  const span = view.end - view.start, [name, factor] = unitOf(span);
  const rough = (span * factor) / Math.max(2, plotWidth() / 110), power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= rough);
  const bottom = data.ranks * rowHeight;
  pen.font = `11.5px ${font}`; pen.textBaseline = "top"; pen.textAlign = "center";
  for (let tick = Math.ceil((view.start * factor) / step); tick * step <= view.end * factor + 1e-9; tick++) {
    const x = Math.round(toX((tick * step) / factor)) + 0.5;
    pen.strokeStyle = rule; pen.lineWidth = 1;
    pen.beginPath(); pen.moveTo(x, 0); pen.lineTo(x, bottom + 5); pen.stroke();
    pen.fillStyle = muted;
    const right = x > leftMargin + plotWidth() - 30;
    pen.textAlign = right ? "right" : "center";
    pen.fillText(`${Number((tick * step).toPrecision(6))} ${name}`, right ? leftMargin + plotWidth() : x, bottom + 10);
  }
}

function barAt(x, y) {
  const rank = Math.floor(y / rowHeight);
  if (rank < 0 || rank >= data.ranks || x < leftMargin) return null;
  const time = toTime(x);
  return byRank[rank].findLast((bar) => bar[1] <= time && time < bar[2]) || null;
}

function showTip(event, bar) {
  tip.style.opacity = bar ? 1 : 0;
  if (!bar) return;
  const [rank, start, end, kind, , , label, action] = bar;
  tip.replaceChildren();
  const head = document.createElement("b");
  head.textContent = label;
  const lines = [kind === "wait" ? `waits for the input of ${label}` : data.names[kind]];
  if (action) lines.push(`stage ${action[0]}, micro ${action[1]}, slice ${action[2]}`);
  lines.push(`rank ${rank}`, `${timeText(end - start)}, from ${timeText(start)} to ${timeText(end)}`);
  tip.append(head);
  for (const line of lines) { const row = document.createElement("div"); row.textContent = line; tip.append(row); }
  const { offsetWidth: width, offsetHeight: height } = tip;
  tip.style.left = `${Math.min(event.clientX + 16, window.innerWidth - width - 8)}px`;
  tip.style.top = `${event.clientY + 20 + height > window.innerHeight ? event.clientY - height - 12 : event.clientY + 20}px`;
}

function setView(start, end) {
  const span = Math.min(whole, Math.max(end - start, whole * 1e-5));
  start = Math.min(Math.max(0, start), whole - span);
  view = { start, end: start + span };
  draw();
}

canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const span = view.end - view.start;
  if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    const shift = (event.deltaX / plotWidth()) * span;
    return setView(view.start + shift, view.end + shift);
  }
  const factor = Math.exp(event.deltaY * 0.0015), at = toTime(event.offsetX);
  setView(at - (at - view.start) * factor, at + (view.end - at) * factor);
}, { passive: false });
canvas.addEventListener("pointerdown", (event) => {
  canvas.setPointerCapture(event.pointerId); canvas.classList.add("moving");
  dragged = { x: event.offsetX, view: { ...view } };
});
canvas.addEventListener("pointermove", (event) => {
  if (dragged) {
    const shift = ((event.offsetX - dragged.x) / plotWidth()) * (dragged.view.end - dragged.view.start);
    return setView(dragged.view.start - shift, dragged.view.end - shift);
  }
  const bar = barAt(event.offsetX, event.offsetY);
  if (bar !== hovered) { hovered = bar; draw(); }
  showTip(event, bar);
});
for (const name of ["pointerup", "pointercancel"]) {
  canvas.addEventListener(name, () => { dragged = null; canvas.classList.remove("moving"); });
}
canvas.addEventListener("pointerleave", (event) => { hovered = null; showTip(event, null); draw(); });
canvas.addEventListener("dblclick", () => setView(0, whole));
byId("fit").addEventListener("click", () => setView(0, whole));
byId("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = window.matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = (root.dataset.theme || (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
  draw();
});
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
new ResizeObserver(draw).observe(canvas.parentElement);

byId("time").textContent = timeText(data.duration_s);
byId("bubble").textContent = percent(data.bubble);
for (const name of ["ranks", "micros", "slices"]) byId(name).textContent = data[name];
for (const kind of Object.keys(data.names)) {
  const used = kind === "wait" || data.bars.some((bar) => bar[3] === kind);
  if (!used) continue;
  const entry = document.createElement("span"), swatch = document.createElement("i");
  if (kind === "wait") swatch.className = "idle";
  else swatch.style.background = `linear-gradient(90deg, ${data.shades[kind][0]}, ${data.shades[kind].at(-1)})`;
  entry.append(swatch, data.names[kind] + (kind !== "wait" && kind !== "other" && data.slices > 1 ? " (later slices darker)" : ""));
  byId("legend").append(entry);
}
draw();
