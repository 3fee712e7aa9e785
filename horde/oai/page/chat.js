// SPDX-License-Identifier: AGPL-3.0-or-later
// The chat page: joins its parts, and asks. Everything that comes from elsewhere is shown as text or as cleaned Markdown.
import { Composer } from "./composer.js";
import { ConversationStore, beginConversation, findStorage } from "./conversations.js";
import { showFailure } from "./failures.js";
import { Failure, complete, fetchFacts } from "./front.js";
import { ConversationList } from "./list.js";
import { Models, describeCount } from "./models.js";
import { formatNumber, make } from "./parts.js";
import { buildMessages, buildOptions } from "./request.js";
import { Settings } from "./settings.js";
import { ExchangeView, copy, keepAtEnd } from "./turns.js";

const ADJUSTMENTS = {
  worker_max_length: "longest reply lowered to what workers offer",
  truncate_oldest: "the oldest turns were left out",
};

const find = (id) => document.getElementById(id);
const turns = find("turns");
const side = find("side");
const storage = findStorage();
const store = new ConversationStore(storage);
const settings = new Settings(storage);

let conversation = beginConversation();
let views = new Map(); // of the exchanges that are shown
let running = null; // {abort, conversation, exchange, view} of the reply that is being written

const models = new Models(settings, showState);
const composer = new Composer({ send, stop, isRunning: () => Boolean(running), seesImages: () => models.seesImages });
const list = new ConversationList(store, { open: openConversation, removed: forget, getCurrentId: () => conversation.id });
const acts = { edit, remove, regenerate, go: (exchange) => ask(exchange) };

// What is shown.

function showState() {
  composer.showState();
  const { isKnown, byName } = models;
  find("welcome").hidden = conversation.exchanges.length > 0;
  const isEmpty = isKnown && byName.size === 0;
  find("welcome-title").textContent = isEmpty ? "No worker serves chat now" : "Ask the horde";
  find("welcome-text").textContent = isEmpty ? "This page looks again every minute. Whoever has a machine to spare can offer a worker." : "Choose a model and write a message.";
  const missing = Object.entries({ tools: "tools", reasoning_effort: "reasoning effort", structured_outputs: "JSON schemas", seed: "a seed" })
    .filter(([parameter]) => models.card && !models.offers(parameter))
    .map(([, name]) => name);
  find("features").textContent = missing.length ? `No worker of this model offers ${missing.join(", ")}.` : "";
}

function announce(text) {
  find("announcement").textContent = text;
}

function showConversation() {
  views = new Map();
  const elements = conversation.exchanges.map((exchange) => {
    const view = running?.exchange === exchange ? running.view : new ExchangeView(exchange, acts);
    views.set(exchange, view);
    return view.element;
  });
  turns.replaceChildren(...elements);
  turns.scrollTop = turns.scrollHeight;
  showState();
  list.show();
}

function openConversation(id) {
  const found = running?.conversation.id === id ? running.conversation : store.get(id);
  conversation = found ?? beginConversation();
  showConversation();
  if (side.matches(":popover-open")) side.hidePopover();
  find("message").focus();
}

function forget(id) {
  if (running?.conversation.id === id) stop();
  if (conversation.id === id) {
    conversation = beginConversation();
    showConversation();
  }
}

function keep(kept) {
  kept.updated = Date.now();
  kept.title = store.get(kept.id)?.title ?? kept.title; // it may have been renamed meanwhile
  if (!store.put(kept)) list.tell("This browser cannot keep this conversation: it ends with the page.");
  list.show();
}

function describeReply(horde, usage, finishReason) {
  const facts = [];
  if (horde) {
    facts.push(`Worker ${horde.worker_name}`, `${formatNumber(horde.kudos, 2)} kudos`);
    if (horde.queue_wait_seconds !== null) facts.push(`${horde.queue_wait_seconds.toFixed(1)} s in the queue`);
  }
  if (usage) facts.push(`${horde?.estimated_usage ? "about " : ""}${describeCount(usage.completion_tokens, "token")}`);
  if (finishReason === "length") facts.push("cut at the longest reply");
  if (finishReason === "content_filter") facts.push("withheld by a filter");
  facts.push(...(horde?.context_adjustments ?? []).map(({ reason }) => ADJUSTMENTS[reason]).filter(Boolean));
  return facts.join(" · ");
}

function describeNothing(reply, finishReason) {
  if (reply.text || reply.toolCalls.length || finishReason === "content_filter") return null;
  const message = finishReason === "length" ? "The reply was cut before it said anything: raise the longest reply in the settings." : "The model answered with nothing.";
  return new Failure({ message });
}

// What happens.

function send() {
  if (running || !canAsk()) return;
  const asked = composer.take();
  if (!asked) return;
  const exchange = { asked, replies: [] };
  conversation.exchanges.push(exchange);
  const view = new ExchangeView(exchange, acts);
  views.set(exchange, view);
  turns.append(view.element);
  ask(exchange);
}

function canAsk() {
  if (!settings.check()) return false;
  if (settings.model.value) return true;
  composer.tell("There is no model to ask now.");
  settings.model.focus();
  return false;
}

function stop() {
  running?.abort.abort();
}

function edit(exchange, text) {
  if (running || !canAsk()) return;
  conversation.exchanges.length = conversation.exchanges.indexOf(exchange);
  conversation.exchanges.push({ asked: { ...exchange.asked, text }, replies: [] });
  showConversation();
  ask(conversation.exchanges.at(-1));
}

function remove(exchange) {
  if (running) return;
  conversation.exchanges.splice(conversation.exchanges.indexOf(exchange), 1);
  if (conversation.exchanges.length) keep(conversation);
  else store.remove(conversation.id);
  showConversation();
  find("message").focus();
}

// Ask anew: the replies of the exchange go, and so does what follows, which built on them.
function regenerate(exchange) {
  if (running || !canAsk()) return;
  const isLast = exchange === conversation.exchanges.at(-1);
  if (!isLast && !confirm("What follows this message is dropped. Go on?")) return;
  conversation.exchanges.length = conversation.exchanges.indexOf(exchange) + 1;
  exchange.replies = [];
  showConversation();
  ask(exchange);
}

async function ask(exchange) {
  if (running || !canAsk()) return;
  const index = conversation.exchanges.indexOf(exchange);
  const options = buildOptions(settings.values);
  const body = { ...options, messages: buildMessages(settings.values.system, conversation.exchanges.slice(0, index + 1), models.seesImages) };
  const reply = { text: "", reasoning: "", model: options.model, facts: "", end: "open", toolCalls: [] };
  exchange.replies.push(reply);
  const view = views.get(exchange);
  view.hideActions();
  const shown = view.addReply(reply);
  reply.end = "open";
  shown.begin(turns);
  running = { abort: new AbortController(), conversation, exchange, view };
  turns.scrollTop = turns.scrollHeight;
  find("message").focus(); // the button that was pressed may be gone
  showState();
  keep(conversation);
  await finish(running, shown, await readReply(body, shown));
}

// Show a reply as it comes. Returns {facts} or {failure}, and how it ended.
async function readReply(body, shown) {
  const { reply } = shown;
  let horde, usage, finishReason;
  try {
    for await (const chunk of complete(body, settings.readKey(), running.abort.signal)) {
      if (chunk.wait) {
        shown.showWait(chunk.wait);
        continue;
      }
      shown.add(chunk);
      horde = chunk.x_horde ?? horde;
      usage = chunk.usage ?? usage;
      finishReason = chunk.choices[0]?.finish_reason ?? finishReason;
    }
  } catch (error) {
    if (error.name === "AbortError") return { end: "stopped", facts: "Stopped." };
    if (!(error instanceof Failure)) console.error(error);
    return { end: "failed", facts: "", failure: error instanceof Failure ? error : new Failure({ message: "This page failed. Reload it." }) };
  }
  return { end: "done", facts: describeReply(horde, usage, finishReason), failure: describeNothing(reply, finishReason) };
}

async function finish({ conversation: asked, exchange, view }, shown, { end, facts, failure }) {
  shown.reply.end = end;
  shown.end(facts);
  running = null;
  if (failure) {
    keepAtEnd(turns, () => shown.element.append(showFailure(failure, listOffers(failure, exchange))));
    shown.reply.facts ||= failure.message; // for when the conversation is opened again
  }
  view.showActions();
  keepAtEnd(turns, () => {});
  announce(failure ? "" : end === "stopped" ? "Stopped." : "The reply is complete.");
  if (asked === conversation || store.get(asked.id)) keep(asked);
  showState();
  if (failure?.status === 503 || failure?.status === 404) models.load();
}

function listOffers(failure, exchange) {
  const again = (prepare) => () => {
    if (running) return;
    prepare?.();
    exchange.replies.pop();
    views.get(exchange)?.reply.element.remove();
    ask(exchange);
  };
  const takeLess = () => {
    find("best-effort").checked = true;
    settings.keep();
  };
  const wantsLess = failure.message.includes("best_effort") && !settings.values.bestEffort;
  return [...(wantsLess ? [{ label: "Ask workers that promise less", act: again(takeLess) }] : []), { label: "Try again", act: again() }];
}

function beginAnew() {
  conversation = beginConversation();
  showConversation();
  if (side.matches(":popover-open")) side.hidePopover();
  find("message").focus();
}

async function showHorde() {
  const { title, site, source } = await fetchFacts().catch(() => ({ title: "Horde" }));
  document.title = find("title").textContent = `${title} chat`;
  const pages = [["", title], ["/register", "Create an account"], ["/account", "Account"], ["/workers", "Workers"], ["/api/", "Documentation"]];
  const links = site ? pages.map(([path, text]) => make("a", { href: site + path, text })) : [];
  if (source) links.push(make("a", { href: source, text: "Source (AGPL)" }));
  find("links").replaceChildren(...links);
  if (!site) return;
  find("welcome-links").replaceChildren(
    make("a", { href: `${site}/register`, text: "Create an account", className: "button" }),
    make("a", { href: `${site}/`, text: "What this horde is", className: "button" }),
  );
}

find("new-chat").addEventListener("click", beginAnew);
find("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.defaultPrevented && !settings.dialog.open && !side.matches(":popover-open")) stop();
});
turns.addEventListener("click", (event) => {
  const button = event.target.closest?.(".copy-code");
  if (button) copy(button, button.closest(".code").querySelector("code").textContent);
});
addEventListener("pagehide", () => {
  if (!running) return;
  const reply = running.exchange.replies.at(-1);
  reply.end = reply.text ? "stopped" : "failed";
  store.put(running.conversation);
});
addEventListener("storage", () => list.show()); // another tab

showConversation();
showHorde();
models.load();
find("message").focus();
