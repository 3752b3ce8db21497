// Elements, figures as text, pictures that follow the width of the window, and the tooltip; and the data of the page,
// in the element #data, which fxpar/analysis/page_data.py and graph_texts.py make.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);

function byId(id) {
  return document.getElementById(id);
}

/** An element with attributes, event listeners ("onclick") and children, which may be text. */
function make(tag, attributes = {}, ...children) {
  const element = tag.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4))
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function threeDigits(value) {
  if (value >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

function withUnit(value, units) {
  const [factor, unit] = units.find(([least]) => value >= least) ?? units[units.length - 1];
  return `${threeDigits(value / factor)} ${unit}`;
}

function timeText(us) {
  return withUnit(us, [[1e6, "s"], [1e3, "ms"], [1, "us"]]);
}

function bytesText(bytes) {
  return withUnit(bytes, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]);
}

function percent(share) {
  return `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%`;
}

function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const STAGE_HUES = 137.5; // degrees between the hues of neighbouring stages

function stageColour(stage) {
  return `hsl(${(210 + stage * STAGE_HUES) % 360} 45% 66%)`;
}

const tooltip = byId("tooltip");

function showTooltip(text, x, y) {
  tooltip.textContent = text;
  tooltip.hidden = false;
  const { width, height } = tooltip.getBoundingClientRect();
  tooltip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 8))}px`;
  tooltip.style.top = `${y + 18 + height > innerHeight ? Math.max(4, y - height - 10) : y + 18}px`;
}

function hideTooltip() {
  tooltip.hidden = true;
}

/** Show `text` while the pointer or the focus is on an element. */
function explain(element, text) {
  element.addEventListener("mousemove", (event) => showTooltip(text, event.clientX, event.clientY));
  element.addEventListener("mouseleave", hideTooltip);
  element.addEventListener("focus", () => {
    const box = element.getBoundingClientRect();
    showTooltip(text, box.left, box.bottom - 12);
  });
  element.addEventListener("blur", hideTooltip);
  return element;
}

/** The width to draw a picture for, so that its texts have the size of others. */
function widthOf(id) {
  return Math.max(byId(id).clientWidth, 560);
}

/** Draw now, and whenever the element gets another width. */
function redrawn(id, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (byId(id).clientWidth !== width) draw();
    width = byId(id).clientWidth;
  }).observe(byId(id));
}
