// SPDX-License-Identifier: AGPL-3.0-or-later
// Parts of pages that are made here. What others wrote becomes text, never markup.

const SVG = "http://www.w3.org/2000/svg";

export function make(tag, { text, className, ...attributes } = {}, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function makeButton(text, act, className = "") {
  const button = make("button", { text, type: "button", className });
  let isActing = false; // not disabled meanwhile: it would lose the focus
  button.addEventListener("click", async () => {
    if (isActing) return;
    isActing = true;
    try {
      await act();
    } finally {
      isActing = false;
    }
  });
  return button;
}

// columns: [{title, isNumber}]; rows: arrays of text or nodes.
export function fillTable(table, columns, rows, empty) {
  if (!rows.length) {
    table.replaceChildren(make("tbody", {}, make("tr", {}, make("td", { text: empty }))));
    return;
  }
  const style = (column) => (column.isNumber ? { className: "number" } : {});
  const head = make("tr", {}, ...columns.map((each) => make("th", { text: each.title, scope: "col", ...style(each) })));
  const body = rows.map((row) => make("tr", {}, ...row.map((cell, index) => make("td", style(columns[index]), cell))));
  table.replaceChildren(make("thead", {}, head), make("tbody", {}, ...body));
}

export function formatNumber(value, digits = 0) {
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

// Short, for axes and tiles.
export function formatFigure(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 10_000_000) return `${formatNumber(value / 1_000_000)}M`;
  if (value >= 10_000) return `${formatNumber(value / 1000)}k`;
  return formatNumber(value, value < 10 ? 1 : 0);
}

export function formatSeconds(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 129600 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
}

export function formatBytes(bytes) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  const step = bytes > 0 ? Math.min(units.length - 1, Math.floor(Math.log10(bytes) / 3)) : 0;
  return `${formatNumber(bytes / 1000 ** step, step ? 1 : 0)} ${units[step]}`;
}

// The first press asks by the button's own words, the second acts; anything else takes it back.
export function confirmTwice(button, question, act) {
  const { textContent: words, ariaLabel: label } = button;
  const reset = () => {
    button.textContent = words;
    button.ariaLabel = label;
    delete button.dataset.asked;
  };
  button.addEventListener("blur", reset);
  button.addEventListener("click", () => {
    if (button.dataset.asked) {
      reset();
      act();
    } else {
      button.dataset.asked = "yes";
      button.textContent = question;
      if (label) button.ariaLabel = `${question}: ${label}`;
    }
  });
}

// Draw a part anew, unless something was written in it or it asks something. The focus stays at
// its place; where nothing is left to focus, it goes to the region around.
export function redraw(box, act) {
  const isWritten = [...box.querySelectorAll("input, textarea")].some((field) => field.value !== field.defaultValue);
  if (isWritten || box.querySelector("[data-asked]")) return;
  const list = (part) => [...part.querySelectorAll("a, button, input, textarea")];
  const focused = document.activeElement;
  const place = list(box).indexOf(focused);
  const item = place < 0 ? null : focused.closest("[data-id]"); // rows may change places
  const placeInItem = item ? list(item).indexOf(focused) : -1;
  act();
  if (place < 0) return;
  const left = list(box);
  const same = item && [...box.querySelectorAll("[data-id]")].find((each) => each.dataset.id === item.dataset.id);
  ((same && list(same)[placeInItem]) ?? left[place] ?? left.at(-1) ?? box.closest("[tabindex]"))?.focus();
}

export class Refusal extends Error {
  constructor(message, status = null) {
    super(message);
    this.status = status;
  }
}

// JSON of the API, asked with a key in a header.
export async function ask(path, key, { method = "GET", body, headers: more = {} } = {}) {
  const type = body === undefined ? {} : { "Content-Type": "application/json" };
  const headers = { apikey: key, ...type, ...more };
  let response;
  try {
    response = await fetch(path, { method, headers, body: body && JSON.stringify(body), credentials: "omit", cache: "no-store" });
  } catch {
    throw new Refusal("The server cannot be reached.");
  }
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) {
    const details = Object.entries(answer.errors ?? {}).map(([name, problem]) => `${name}: ${problem}`);
    throw new Refusal([answer.message ?? `The server answered ${response.status}.`, ...details].join(" "), response.status);
  }
  return answer;
}

// A key that a header can carry; others would fail without saying why.
export function isKey(text) {
  return /^[\x21-\x7e]{1,100}$/.test(text);
}
