// SPDX-License-Identifier: AGPL-3.0-or-later
// A reply that is shown as Markdown while it grows. Blocks that cannot change any more stay as they are; only the end is
// read again, and of it only what differs is replaced: nothing flickers, and a long reply costs no more for each word.
import { readBlocks, renderBlocks, renderMarkdown, renderPlain } from "./markdown.js";

const LONGEST_END = 8000; // characters that are read again each time
const REST = 4; // times as long as the last drawing took, until the next one
const SHARE = 50; // of a long end, one part of so many has to be new before it is read again
const FENCE = /^(`{3,}|~{3,})[^`\n]*\n/;
const DEFINITION = /^ {0,3}\[[^\]]+\]:/m; // a link whose address comes below its text

export class StreamedMarkdown {
  #element;
  #text = "";
  #end = ""; // what comes after the blocks that are done
  #lastDone = null; // the node that ends them
  #code = null; // an open fence: {text, closing, rest}
  #isPlain = false;
  #timer = 0;
  #notBefore = 0;
  #readLength = 0; // of the end, when it was last read
  #afterDrawing;
  readCount = 0; // characters read so far, each time they were

  // afterDrawing runs the drawing it is given, so that a reader can be kept at the end.
  constructor(element, afterDrawing = (draw) => draw()) {
    this.#element = element;
    this.#afterDrawing = afterDrawing;
  }

  get text() {
    return this.#text;
  }

  append(piece) {
    this.#text += piece;
    this.#end += piece.replaceAll("\r", "");
    this.#timer ||= setTimeout(() => this.#drawSoon(), Math.max(0, this.#notBefore - performance.now()));
  }

  // Show all of it now, for good.
  finish() {
    if (DEFINITION.test(this.#text)) this.#afterDrawing(() => this.#element.replaceChildren(renderMarkdown(this.#text)));
    else this.draw(true);
    clearTimeout(this.#timer);
  }

  // Show what has come so far.
  draw(isLast = false) {
    clearTimeout(this.#timer);
    this.#timer = 0;
    const begun = performance.now();
    this.#afterDrawing(() => this.#draw(isLast));
    const now = performance.now();
    this.#notBefore = now + (now - begun) * REST;
  }

  #drawSoon() {
    if (document.hidden) this.draw();
    else requestAnimationFrame(() => this.#timer && this.draw());
  }

  #draw(isLast) {
    if (!isLast && this.#code && this.#continueCode()) return;
    this.#code = null;
    const added = this.#end.length - this.#readLength;
    if (!isLast && added < this.#readLength / SHARE && this.#readLength > LONGEST_END / 4) return;
    this.#readLength = this.#end.length;
    if (this.#isPlain) {
      this.#replaceEnd(renderPlain(this.#end));
      return;
    }
    try {
      this.#drawBlocks();
      if (!isLast) this.#beginCode();
    } catch {
      this.#isPlain = true;
      this.#replaceEnd(renderPlain(this.#end));
    }
  }

  #drawBlocks() {
    const blocks = readBlocks(this.#end);
    this.readCount += this.#end.length;
    const count = countDone(blocks);
    const done = renderBlocks(blocks.slice(0, count));
    const lastDone = done.lastChild;
    const length = blocks.slice(0, count).reduce((sum, block) => sum + block.raw.length, 0);
    done.append(renderBlocks(blocks.slice(count)));
    const kept = this.#replaceEnd(done, lastDone);
    this.#lastDone = kept ?? this.#lastDone;
    this.#end = this.#end.slice(length);
    this.#readLength = this.#end.length;
  }

  // Put new nodes where the old end was. Returns what stands there for `marked`, one of the new ones.
  #replaceEnd(fragment, marked = null) {
    let old = this.#lastDone ? this.#lastDone.nextSibling : this.#element.firstChild;
    let found = null;
    for (const node of [...fragment.childNodes]) {
      const next = old?.nextSibling ?? null;
      const standing = old ? patch(old, node) : this.#element.appendChild(node);
      if (node === marked) found = standing;
      old = next;
    }
    while (old) {
      const next = old.nextSibling;
      old.remove();
      old = next;
    }
    return found;
  }

  #beginCode() {
    const opened = FENCE.exec(this.#end);
    const node = this.#element.lastElementChild?.querySelector("code")?.firstChild;
    if (!opened || !node) return;
    const body = this.#end.slice(opened[0].length);
    const closing = new RegExp(`^ {0,3}${opened[1][0]}{${opened[1].length},}[^\\S\\n]*$`, "m");
    if (closing.test(body)) return;
    node.data = body;
    this.#code = { node, closing, seen: this.#end.length };
  }

  // Add what is new to an open block of code; false once its end is there.
  #continueCode() {
    const { node, closing, seen } = this.#code;
    const from = this.#end.lastIndexOf("\n", seen - 1) + 1;
    const added = this.#end.slice(from);
    if (closing.test(added)) return false;
    node.appendData(this.#end.slice(seen));
    this.#code.seen = this.#end.length;
    return true;
  }
}

// How many blocks no further text can change: the last may grow, and the line that is being written may turn out to belong to
// the one before it. What is longer than anybody writes is done all the same.
function countDone(blocks) {
  let count = blocks.length;
  let length = 0;
  for (let open = 2; open > 0 && count > 0; ) {
    length += blocks[count - 1].raw.length;
    if (length > LONGEST_END && blocks[count - 1].type !== "code") return count;
    count -= 1;
    if (blocks[count].type !== "space") open -= 1;
  }
  return count;
}

// Make an element what another one is, keeping what is the same of it. Returns what stands there now.
function patch(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) {
    old.replaceWith(fresh);
    return fresh;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    if (fresh.data.startsWith(old.data)) old.appendData(fresh.data.slice(old.data.length));
    else old.data = fresh.data;
    return old;
  }
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  let standing = old.firstChild;
  for (const node of [...fresh.childNodes]) {
    const next = standing?.nextSibling ?? null;
    if (standing) patch(standing, node);
    else old.append(node);
    standing = next;
  }
  while (standing) {
    const next = standing.nextSibling;
    standing.remove();
    standing = next;
  }
  return old;
}
