// SPDX-License-Identifier: AGPL-3.0-or-later
// What a conversation looks like: what was asked, the replies, and what can be done with them.
import { renderMarkdown } from "./markdown.js";
import { formatNumber, formatSeconds, make, makeButton } from "./parts.js";
import { StreamedMarkdown } from "./stream.js";

const COPIED_MILLISECONDS = 1500;

export function keepAtEnd(scroller, change) {
  const { scrollTop, clientHeight, scrollHeight } = scroller;
  change();
  if (scrollTop + clientHeight > scrollHeight - 60) scroller.scrollTop = scroller.scrollHeight; // unless somebody reads above
}

export async function copy(button, text) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed"; // a page over plain http has no clipboard
  }
  setTimeout(() => (button.textContent = label), COPIED_MILLISECONDS);
}

// A JSON reply is shown as code.
export function isJson(text) {
  if (!/^\s*[{[]/.test(text)) return false;
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

function fence(text) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((ticks) => ticks.length));
  const ticks = "`".repeat(longest + 1);
  return `${ticks}json\n${text}\n${ticks}`;
}

export function describeWait(wait, seconds) {
  const facts = [`${wait?.queue_position === 0 ? "A worker is at it" : "Waiting for a worker"} … ${Math.round(seconds)} s`];
  if (wait?.queue_position > 0) facts.push(`number ${formatNumber(wait.queue_position)} in the queue`);
  if (wait?.wait_time > 0) facts.push(`about ${formatSeconds(wait.wait_time)}`);
  if (wait?.kudos > 0) facts.push(`at most ${formatNumber(wait.kudos, 1)} kudos`);
  return facts.join(" · ");
}

export class ReplyView {
  constructor(reply) {
    this.reply = reply;
    this.label = make("p", { className: "who", text: reply.model });
    this.content = make("div", { className: "text", dir: "auto" });
    this.facts = make("p", { className: "facts", text: reply.facts });
    this.element = make("article", { className: "turn answered" }, this.label, this.content, this.facts);
    if (reply.reasoning) this.#addReasoning(reply.reasoning);
    if (reply.text) this.content.append(renderMarkdown(isJson(reply.text) ? fence(reply.text) : reply.text));
    for (const call of reply.toolCalls) this.#showCall(call);
    if (reply.end === "open") reply.end = reply.text ? "stopped" : "failed"; // its page was closed
  }

  // The reply is being written: `scroller` follows it unless somebody reads above.
  begin(scroller) {
    this.element.setAttribute("aria-busy", "true");
    this.scroller = scroller;
    this.stream = new StreamedMarkdown(this.content, (draw) => keepAtEnd(scroller, draw));
    this.begun = performance.now();
    this.wait = null;
    this.clock = setInterval(() => this.showWait(), 1000);
    this.showWait();
  }

  showWait(wait = this.wait) {
    this.wait = wait;
    this.facts.textContent = describeWait(wait, (performance.now() - this.begun) / 1000);
  }

  #stopWaiting() {
    clearInterval(this.clock);
    this.facts.textContent = "";
  }

  // One chunk of a completion.
  add(chunk) {
    const delta = chunk.choices[0]?.delta ?? {};
    if (chunk.choices[0]) this.#stopWaiting();
    if (chunk.model) this.label.textContent = this.reply.model = chunk.model;
    if (delta.reasoning_content) {
      this.reply.reasoning += delta.reasoning_content;
      keepAtEnd(this.scroller, () => this.#addReasoning(delta.reasoning_content));
    }
    if (delta.content) {
      this.reply.text += delta.content;
      this.stream.append(delta.content);
    }
    for (const { id, function: called } of delta.tool_calls ?? []) {
      const call = { id, name: called.name, arguments: called.arguments };
      this.reply.toolCalls.push(call);
      this.#showCall(call);
    }
  }

  end(facts) {
    this.#stopWaiting();
    this.stream.finish();
    keepAtEnd(this.scroller, () => {
      if (isJson(this.reply.text)) this.content.replaceChildren(renderMarkdown(fence(this.reply.text)));
      this.element.removeAttribute("aria-busy");
      this.facts.textContent = this.reply.facts = facts;
    });
  }

  #addReasoning(text) {
    if (!this.reasoning) {
      this.reasoning = make("div", { className: "plain", dir: "auto" });
      this.content.before(make("details", { className: "reasoning" }, make("summary", { text: "Reasoning" }), this.reasoning));
    }
    this.reasoning.append(text);
  }

  #showCall(call) {
    const id = `result-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
    const field = make("textarea", { id, rows: 2, dir: "auto" });
    field.value = call.result ?? "";
    field.addEventListener("input", () => (call.result = field.value));
    const code = make("pre", { tabindex: 0, role: "group", "aria-label": "Arguments" }, make("code", { text: call.arguments }));
    const label = make("label", { text: `Result of ${call.name}`, for: id });
    this.facts.before(make("div", { className: "call" }, make("p", { className: "who", text: `Calls ${call.name}` }), code, label, field));
  }
}

// `acts`: {edit(exchange, text), remove(exchange), regenerate(exchange), go(exchange)}
export class ExchangeView {
  constructor(exchange, acts) {
    Object.assign(this, { exchange, acts });
    this.element = make("section", { className: "exchange" });
    this.asked = make("article", { className: "turn asked" });
    this.element.append(this.asked);
    this.showAsked();
    for (const reply of exchange.replies) this.addReply(reply);
    this.showActions();
  }

  showAsked() {
    const { text, images } = this.exchange.asked;
    const shown = images.map((url, index) => make("img", { src: url, alt: `Image ${index + 1} of the message` }));
    const pictures = images.length ? [make("div", { className: "images" }, ...shown)] : [];
    this.asked.replaceChildren(make("p", { className: "hidden", text: "You" }), ...pictures, make("div", { className: "plain", dir: "auto", text }));
  }

  addReply(reply) {
    this.reply = new ReplyView(reply);
    this.element.append(this.reply.element);
    return this.reply;
  }

  // Nothing can be done while a reply is written.
  hideActions() {
    for (const row of this.element.querySelectorAll(".turn-actions")) row.remove();
  }

  showActions() {
    this.hideActions();
    const { exchange, acts } = this;
    const { toolCalls = [], text = "" } = exchange.replies.at(-1) ?? {};
    const row = (...buttons) => make("div", { className: "turn-actions" }, ...buttons);
    this.asked.after(row(makeButton("Edit", () => this.#edit(), "quiet"), makeButton("Delete", () => acts.remove(exchange), "quiet")));
    const buttons = [];
    if (toolCalls.length) buttons.push(makeButton("Send results", () => acts.go(exchange), "quiet"));
    if (text) {
      const button = make("button", { type: "button", className: "quiet", text: "Copy" });
      button.addEventListener("click", () => copy(button, text));
      buttons.push(button);
    }
    const offersAgain = this.reply?.element.querySelector(".error button");
    if (!offersAgain) buttons.push(makeButton("Regenerate", () => acts.regenerate(exchange), "quiet"));
    if (buttons.length) this.element.append(row(...buttons));
  }

  #edit() {
    const field = make("textarea", { rows: 3, dir: "auto", "aria-label": "Message" });
    field.value = this.exchange.asked.text;
    const restore = () => {
      this.showAsked();
      this.showActions();
      this.element.querySelector(".turn-actions button").focus();
    };
    const resend = () => field.value.trim() && this.acts.edit(this.exchange, field.value.trim());
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") restore();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        resend();
      }
    });
    const hint = make("p", { className: "hint", text: "What follows this message is dropped." });
    const buttons = [makeButton("Resend", resend, "main"), makeButton("Cancel", restore)];
    this.asked.replaceChildren(field, hint, make("div", { className: "actions" }, ...buttons));
    this.element.querySelector(".turn-actions").remove();
    field.focus();
  }
}
