// SPDX-License-Identifier: AGPL-3.0-or-later
// Markdown of models as elements that are safe to show: marked reads it, DOMPurify keeps what is on a short list, and the
// page's policy would stop the rest. Nothing in it loads anything: an image becomes a link.
import "./vendor/purify.min.js"; // a script for every loader there is; it names itself on the window
import { Marked } from "./vendor/marked.esm.js";

const CLEANING = {
  ALLOWED_TAGS: [
    "a", "b", "blockquote", "br", "code", "del", "div", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "span", "strong",
    "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["align", "class", "href", "start"],
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};
const BLOCKS = "p, li, h1, h2, h3, h4, h5, h6, th, td, blockquote";
const LINKED = new Set(["http:", "https:", "mailto:"]);
// Each way to begin a formula with its end. A single dollar begins one where a price would not.
const BLOCK_FORMULA = /^ {0,3}(?:\$\$[^]*?(?:\$\$|\n\s*\n|$)|\\\[[^]*?(?:\\\]|\n\s*\n|$))[^\S\n]*(?:\n|$)/;
const INLINE_FORMULA = /^(?:\$\$[^]+?\$\$|\\\[[^]+?\\\]|\\\([^]+?\\\)|\$(?![\s\d])(?:[^$\n\\]|\\.)*?(?<!\s)\$(?!\d))/;
// Deeper than anybody writes, and so deep that reading it would take for ever.
const TOO_DEEP = /^(?:[ \t]*(?:>|[-*+][ \t]|\d{1,9}[.)][ \t])){50}|^[ \t]{100,}(?:[-*+>]|\d{1,9}[.)])[ \t]/m;

export function escape(text) {
  return text.replace(/[&<>"']/g, (letter) => `&#${letter.charCodeAt(0)};`);
}

function readAddress(text) {
  try {
    const url = new URL(text);
    return LINKED.has(url.protocol) ? url : null;
  } catch {
    return null;
  }
}

// Whether somebody who reads this text of a link knows where it leads.
function tellsAddress(text, url) {
  if (!/^[\x21-\x7e]+$/.test(text) || url.username || url.password) return false;
  if (url.protocol === "mailto:") return text.replace(/^mailto:/i, "") === url.pathname;
  return readAddress(/^https?:/i.test(text) ? text : `https://${text}`)?.host === url.host;
}

function writeLink(href, inner, plain) {
  const url = readAddress(href);
  if (!url) return inner; // a script, a file, or a place in this page
  const place = tellsAddress(plain, url) ? "" : ` <span class="host">(${escape(url.host || url.pathname)})</span>`;
  return `<a href="${escape(url.href)}">${inner}</a>${place}`;
}

const renderer = {
  html: ({ text, block }) => (block ? `<p class="plain">${escape(text.trim())}</p>` : escape(text)),
  link({ href, tokens, text }) {
    return writeLink(href, this.parser.parseInline(tokens), text);
  },
  image: ({ href, text }) => writeLink(href, escape(text || "image"), text),
  checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  code({ text, lang }) {
    const language = /^[\w#+.-]{1,30}/.exec(lang ?? "")?.[0] ?? "";
    return `<pre><code class="${escape(language)}">${escape(text)}\n</code></pre>`;
  },
};

function readFormula({ type, level, pattern, begins, tag }) {
  return {
    name: type,
    level,
    start: (source) => {
      const found = begins.exec(source);
      return found ? found.index + found[1].length : undefined;
    },
    tokenizer(source) {
      const found = pattern.exec(source);
      return found ? { type, raw: found[0], text: found[0].trim() } : undefined;
    },
    renderer: ({ text }) => `<${tag} class="formula">${escape(text)}</${tag}>`,
  };
}

const FORMULAS = [
  { type: "blockFormula", level: "block", pattern: BLOCK_FORMULA, begins: /(^|\n) {0,3}(?:\$\$|\\\[)/, tag: "div" },
  { type: "inlineFormula", level: "inline", pattern: INLINE_FORMULA, begins: /()(?:\$|\\[[(])/, tag: "span" },
];
const marked = new Marked({ gfm: true, breaks: true, renderer, extensions: FORMULAS.map(readFormula) });

// The blocks of a text, each with its `raw` source. Raises RangeError when it is nested beyond all measure.
export function readBlocks(text) {
  if (TOO_DEEP.test(text)) throw new RangeError("nested too deep");
  return marked.lexer(text);
}

// What the blocks look like, as a fragment.
export function renderBlocks(blocks) {
  if (!blocks.length) return document.createDocumentFragment();
  const fragment = DOMPurify.sanitize(marked.parser(blocks), CLEANING);
  for (const block of fragment.querySelectorAll(BLOCKS)) block.dir = "auto";
  for (const link of fragment.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer nofollow" });
  for (const table of fragment.querySelectorAll("table")) wrap(table, "table", "Table");
  for (const code of fragment.querySelectorAll("pre")) frameCode(code);
  return fragment;
}

// The text as a fragment; as it is where it cannot be read as Markdown.
export function renderMarkdown(text) {
  try {
    return renderBlocks(readBlocks(text));
  } catch {
    return renderPlain(text);
  }
}

export function renderPlain(text) {
  const fragment = document.createDocumentFragment();
  const paragraph = document.createElement("p");
  paragraph.className = "plain";
  paragraph.dir = "auto";
  paragraph.append(text);
  fragment.append(paragraph);
  return fragment;
}

// What is wider than the page moves within a box that the keyboard reaches.
function wrap(element, className, name) {
  const box = document.createElement("div");
  Object.assign(box, { className: `scroll ${className}`, tabIndex: 0, role: "group", ariaLabel: name });
  element.replaceWith(box);
  box.append(element);
}

function frameCode(code) {
  const frame = document.createElement("div");
  const head = document.createElement("div");
  const copy = document.createElement("button");
  frame.className = "code";
  head.className = "code-head";
  Object.assign(copy, { type: "button", className: "small copy-code", textContent: "Copy" });
  copy.setAttribute("aria-label", "Copy this code");
  head.append(code.firstElementChild.className, copy);
  Object.assign(code, { tabIndex: 0, role: "group", ariaLabel: "Code", dir: "ltr" });
  code.replaceWith(frame);
  frame.append(head, code);
}
