"""The template of the page that :mod:`fsdp_compile.explain.html` fills: styles for light and dark, and the script."""

from __future__ import annotations

from string import Template

_STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --text: #22272e; --soft: #667080; --line: #e3e6eb; --card: #f7f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #15181d; --text: #e4e7ec; --soft: #98a2b3; --line: #2b313a; --card: #1d2128; }
}
body { margin: 0 auto; max-width: 1440px; padding: 28px 24px 60px; background: var(--ground); color: var(--text);
  font: 14px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 20px; font-weight: 600; margin: 0 0 6px; }
h2 { font-size: 15px; font-weight: 600; margin: 30px 0 6px; }
p { margin: 2px 0; }
ul { margin: 2px 0 10px; padding-left: 20px; }
#chart { display: block; width: 100%; height: auto; margin-top: 22px; user-select: none; cursor: crosshair; }
#chart text { font-size: 11.5px; fill: var(--soft); text-anchor: middle; dominant-baseline: middle; }
#chart text.head { fill: var(--text); text-anchor: start; dominant-baseline: auto; }
#chart text.row { text-anchor: end; }
#chart .labels text { fill: #14181f; pointer-events: none; }
#chart rect { stroke-width: 0; vector-effect: non-scaling-stroke; }
#chart .wait, #chart .collective { stroke-width: 1px; }
#chart rect:hover { filter: brightness(1.12); }
#chart .level { stroke: var(--line); stroke-dasharray: 3 4; pointer-events: none; }
#range { fill: var(--text); opacity: 0.15; pointer-events: none; }
.legend { margin: 8px 0 0 8.6%; font-size: 12px; color: var(--soft); }
.legend span { display: inline-block; margin-right: 16px; white-space: nowrap; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 5px; vertical-align: -1px; }
.table { overflow-x: auto; margin: 14px 0 22px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 14px 3px 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { font-weight: 500; color: var(--soft); }
th:first-child, td:first-child { text-align: left; }
.note { color: var(--soft); font-size: 12.5px; }
#tip { position: fixed; display: none; max-width: 420px; padding: 7px 10px; border-radius: 6px; white-space: pre-line;
  background: var(--text); color: var(--ground); font-size: 12px; pointer-events: none; z-index: 1; }
"""

_SCRIPT = """
"use strict";
const chart = document.getElementById("chart"), tip = document.getElementById("tip");
const memory = JSON.parse(document.getElementById("memory").textContent);
const numbers = ["left", "width", "total", "across", "character"].map(key => Number(chart.dataset[key]));
const [left, width, total, across, character] = numbers;
let since = 0, until = total, from = null;

for (const title of chart.querySelectorAll("title")) {
  title.parentNode.dataset.tip = title.textContent;
  title.remove();
}

function timeAt(event) {
  const box = chart.getBoundingClientRect();
  const x = (event.clientX - box.left) * chart.viewBox.baseVal.width / box.width - left;
  return since + Math.min(1, Math.max(0, x / width)) * (until - since);
}
const place = time => left + (time - since) / (until - since) * width;

function text(parent, x, words) {
  const made = document.createElementNS(chart.namespaceURI, "text");
  made.setAttribute("x", x);
  made.setAttribute("y", Number(parent.dataset.y) + (parent.id === "axis" ? 16 : 0));
  made.textContent = words;
  parent.append(made);
}

function label(group) {
  group.replaceChildren();
  const joined = [];
  for (const rect of group.previousElementSibling.querySelectorAll("rect:not(.wait)")) {
    const [begin, duration] = rect.dataset.ns.split(" ").map(Number), end = begin + duration, last = joined.at(-1);
    if (end < since || begin > until || duration / (until - since) * width < 2) continue;
    if (last && last.name === rect.dataset.name) last.end = end;
    else joined.push({name: rect.dataset.name, begin, end});
  }
  for (const {name, begin, end} of joined) {
    const first = place(Math.max(begin, since)), last = place(Math.min(end, until));
    const fits = [name, name.split(".").at(-1)].find(words => words.length * character + 6 < last - first);
    if (fits) text(group, (first + last) / 2, fits);
  }
}

function show(begin, end) {
  [since, until] = [begin, end];
  for (const view of chart.querySelectorAll("svg.view")) {
    const box = [since, until - since].map(time => time / total * across);
    view.setAttribute("viewBox", `$${box[0]} 0 $${box[1]} $${view.viewBox.baseVal.height}`);
  }
  chart.querySelectorAll(".labels").forEach(label);
  const axis = document.getElementById("axis"), rough = (until - since) / 8, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find(number => number * power >= rough) * power;
  axis.replaceChildren();
  for (let time = Math.ceil(since / step) * step; time <= until; time += step) {
    text(axis, place(time), `$${parseFloat((time / 1e6).toPrecision(9))} ms`);
  }
}

function bytes(number) {
  const power = Math.min(3, Math.floor(Math.log2(Math.max(number, 1)) / 10));
  return `$${parseFloat((number / 1024 ** power).toPrecision(4))} $${["B", "KiB", "MiB", "GiB"][power]}`;
}

function memoryAt(time) {
  const [at, ...held] = memory.held.findLast(row => row[0] <= time) ?? memory.held[0];
  const lines = memory.names.map((name, index) => `$${name}: $${bytes(held[index])}`).reverse();
  return [`$${(time / 1e6).toFixed(3)} ms: $${bytes(held.reduce((one, other) => one + other, 0))}`, ...lines].join("\\n");
}

function mark(time) {
  document.getElementById("range")?.remove();
  if (from === null) return;
  const range = document.createElementNS(chart.namespaceURI, "rect"), [first, last] = [from, time].sort((a, b) => a - b);
  const sizes = {id: "range", x: place(first), y: 0, width: place(last) - place(first), height: chart.viewBox.baseVal.height};
  for (const [key, value] of Object.entries(sizes)) range.setAttribute(key, value);
  chart.append(range);
}

chart.addEventListener("pointerdown", event => { from = timeAt(event); chart.setPointerCapture(event.pointerId); });
chart.addEventListener("pointerup", event => {
  const [first, last] = [from, timeAt(event)].sort((a, b) => a - b);
  from = null;
  mark(0);
  if ((last - first) / (until - since) > 0.003) show(first, last);
});
chart.addEventListener("dblclick", () => show(0, total));
chart.addEventListener("wheel", event => {
  if (!event.ctrlKey) return;
  event.preventDefault();
  const time = timeAt(event), factor = event.deltaY < 0 ? 0.8 : 1.25;
  show(Math.max(0, time - (time - since) * factor), Math.min(total, time + (until - time) * factor));
}, {passive: false});
chart.addEventListener("pointermove", event => {
  if (from !== null) mark(timeAt(event));
  const words = event.target.dataset?.tip ?? (event.target.closest?.(".memory") ? memoryAt(timeAt(event)) : "");
  tip.style.display = words ? "block" : "none";
  tip.textContent = words;
  tip.style.left = `$${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 10)}px`;
  tip.style.top = `$${Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 10)}px`;
});
chart.addEventListener("pointerleave", () => { tip.style.display = "none"; });
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

#: Takes ``title``, ``lines``, ``chart``, ``legend``, ``verdict``, ``tables`` and ``data``, all escaped.
PAGE = Template(
    f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>$title</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>$title</h1>
$lines
$chart
<div class="legend">
$legend</div>
<p class="note">Drag over a stretch to zoom into it, or turn the wheel with Ctrl; double-click for all of the step.</p>
<h2>What is exposed, and what to try</h2>
$verdict
<h2>Tables</h2>
$tables
<div id="tip"></div>
<script type="application/json" id="memory">$data</script>
<script>{_SCRIPT}</script>
</body>
</html>
"""
)
