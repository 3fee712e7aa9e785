// SPDX-License-Identifier: AGPL-3.0-or-later
// A chat through this front's own /v1 routes. Everything that comes from elsewhere is shown with textContent, never as markup.

const ANONYMOUS_KEY = "0000000000";
const STORED_KEY = "horde-chat-key";
const HINTS = {
  401: "Check the key in the settings, or leave it empty to ask anonymously.",
  429: "Wait a little, then try again.",
  502: "The horde or its workers failed. Trying again may help.",
  503: "Nobody can answer now. Choose another model, or try again later.",
  504: "Nobody answered in time. A shorter reply or another model may be quicker.",
};
const ADJUSTMENTS = {
  worker_max_length: "longest reply lowered to what workers offer",
  truncate_oldest: "the oldest turns were left out",
};

const find = (id) => document.getElementById(id);
const page = Object.fromEntries(
  ["settings", "model", "model-facts", "reload", "key", "keep-key", "system", "max-tokens", "temperature", "best-effort", "turns",
    "announcement", "composer", "message", "send", "stop", "new-chat"].map((id) => [id, find(id)]),
);

let models = new Map();
let exchanges = []; // {asked, answered, failed}; a failed one is not sent again as history
let running = null; // the AbortController of the reply being read

class Failure extends Error {
  constructor({ message, code = null, status = null, requestId = null, retryAfter = null }) {
    super(message);
    Object.assign(this, { code, status, requestId, retryAfter });
  }
}

// The front.

function buildFailure(body, response) {
  const error = body?.error ?? {};
  return new Failure({
    message: error.message ?? `The server answered ${response?.status ?? "something unreadable"}.`,
    code: error.code,
    status: response && !response.ok ? response.status : null,
    requestId: error.metadata?.request_id,
    retryAfter: response?.headers.get("Retry-After"),
  });
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, { credentials: "omit", cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure({ message: "The server cannot be reached." });
  }
  if (!response.ok) throw buildFailure(await response.json().catch(() => null), response);
  return response;
}

async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader(); // not every browser can iterate over a stream
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
      if (data.length) yield data.join("\n"); // a comment keeps the connection open and says nothing
    }
  }
}

async function* complete(body, key, signal) {
  if (!/^[\x21-\x7e]+$/.test(key)) { // the browser would refuse the header, and not say why
    throw new Failure({ message: "The API key holds characters that no key has.", code: "invalid_api_key", status: 401 });
  }
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", Authorization: `Bearer ${key}` },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  try {
    for await (const data of readEvents(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw buildFailure(chunk);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof Failure || error.name === "AbortError") throw error;
    throw new Failure({ message: "The connection broke." });
  }
  throw new Failure({ message: "The reply broke off." });
}

// What is shown.

function make(tag, className, text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}

function showTurn(className, who, text) {
  const turn = make("article", `turn ${className}`);
  const label = make("p", className === "asked" ? "hidden" : "who", who);
  const content = make("div", "text", text);
  turn.append(label, content);
  page.turns.append(turn);
  return { turn, label, content };
}

function keepAtEnd(change) {
  const { scrollTop, clientHeight, scrollHeight } = page.turns;
  change();
  if (scrollTop + clientHeight > scrollHeight - 40) page.turns.scrollTop = page.turns.scrollHeight; // unless somebody reads above
}

function describeCount(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}

function describeReply(horde, usage, finishReason) {
  const facts = [];
  if (horde) {
    facts.push(`Worker ${horde.worker_name}`, `${horde.kudos.toLocaleString("en")} kudos`);
    if (horde.queue_wait_seconds !== null) facts.push(`${horde.queue_wait_seconds.toFixed(1)} s in the queue`);
  }
  if (usage) facts.push(`${horde?.estimated_usage ? "about " : ""}${describeCount(usage.completion_tokens, "token")}`);
  if (finishReason === "length") facts.push("cut at the longest reply");
  if (finishReason === "content_filter") facts.push("withheld by a filter");
  facts.push(...(horde?.context_adjustments ?? []).map(({ reason }) => ADJUSTMENTS[reason]).filter(Boolean));
  return facts.join(" · ");
}

function showFailure(view, failure, exchange) {
  const box = make("div", "error");
  box.setAttribute("role", "alert");
  box.append(make("p", "", failure.message));
  const wait = failure.retryAfter ? `Try again in ${failure.retryAfter} s.` : HINTS[failure.status];
  const details = [wait, failure.code && `Code ${failure.code}.`, failure.requestId && `Request ${failure.requestId}.`];
  box.append(make("p", "hint", details.filter(Boolean).join(" ")));
  const wantsLess = failure.message.includes("best_effort") && !page["best-effort"].checked;
  if (wantsLess) {
    addRetry(box, exchange, "Ask workers that promise less", () => (page["best-effort"].checked = true));
  }
  addRetry(box, exchange, "Try again");
  view.turn.append(box);
}

function addRetry(box, exchange, label, prepare = () => {}) {
  const again = make("button", "again", label);
  again.type = "button";
  again.addEventListener("click", () => {
    if (running) return;
    prepare();
    page.message.focus(); // the button goes away
    exchange.views.forEach((turn) => turn.remove());
    exchanges = exchanges.filter((other) => other !== exchange);
    ask(exchange.asked);
  });
  box.append(again);
}

class ReplyView {
  constructor(model) {
    Object.assign(this, showTurn("answered", model, ""));
    this.turn.setAttribute("aria-busy", "true");
    this.waiting = make("p", "facts", "Waiting for a worker …");
    this.turn.append(this.waiting);
    const started = Date.now();
    this.clock = setInterval(() => {
      this.waiting.textContent = `Waiting for a worker … ${Math.round((Date.now() - started) / 1000)} s`;
    }, 1000);
  }

  beginText() {
    clearInterval(this.clock);
    this.waiting.remove();
  }

  addReasoning(text) {
    if (!this.reasoning) {
      const box = make("details", "reasoning");
      box.append(make("summary", "", "Reasoning"), (this.reasoning = make("div", "text")));
      this.content.before(box);
    }
    this.reasoning.append(text);
  }

  end(facts) {
    this.beginText();
    this.turn.setAttribute("aria-busy", "false");
    if (facts) this.turn.append(make("p", "facts", facts));
  }
}

// What happens.

function readKey() {
  return page.key.value.trim() || ANONYMOUS_KEY;
}

function buildBody(asked) {
  const system = page.system.value.trim();
  const history = exchanges.filter((exchange) => exchange.answered);
  const messages = [
    ...(system ? [{ role: "system", content: system }] : []),
    ...history.flatMap(({ asked, answered }) => [{ role: "user", content: asked }, { role: "assistant", content: answered }]),
    { role: "user", content: asked },
  ];
  const body = { model: page.model.value, messages };
  if (page["max-tokens"].value !== "") body.max_tokens = page["max-tokens"].valueAsNumber;
  if (page.temperature.value !== "") body.temperature = page.temperature.valueAsNumber;
  if (page["best-effort"].checked) body.horde = { conformance: "best_effort" };
  return body;
}

async function ask(asked) {
  const body = buildBody(asked);
  const view = new ReplyView(body.model);
  const exchange = { asked, answered: "", views: [] };
  view.turn.before((exchange.views[0] = make("article", "turn asked")));
  exchange.views[0].append(make("p", "hidden", "You"), make("div", "text", asked));
  exchange.views[1] = view.turn;
  page.turns.scrollTop = page.turns.scrollHeight;
  running = new AbortController();
  showRunning(true);
  let horde, usage, finishReason;
  try {
    for await (const chunk of complete(body, readKey(), running.signal)) {
      const choice = chunk.choices[0];
      keepAtEnd(() => {
        if (choice) view.beginText();
        if (choice?.delta.reasoning_content) view.addReasoning(choice.delta.reasoning_content);
        if (choice?.delta.content) view.content.append(choice.delta.content);
        if (chunk.model) view.label.textContent = chunk.model;
      });
      exchange.answered += choice?.delta.content ?? "";
      horde = chunk.x_horde ?? horde;
      usage = chunk.usage ?? usage;
      finishReason = choice?.finish_reason ?? finishReason;
    }
    keepAtEnd(() => view.end(describeReply(horde, usage, finishReason)));
    announce("The reply is complete.");
  } catch (error) {
    if (error.name === "AbortError") {
      keepAtEnd(() => view.end("Stopped."));
      announce("Stopped.");
    } else {
      const failure = error instanceof Failure ? error : new Failure({ message: "This page failed. Reload it." });
      if (failure !== error) console.error(error);
      exchange.answered = ""; // a broken reply is not something to build on
      keepAtEnd(() => {
        view.end("");
        showFailure(view, failure, exchange);
      });
    }
  } finally {
    running = null;
    showRunning(false);
  }
  exchanges.push(exchange);
}

function announce(text) {
  page.announcement.textContent = text;
}

function showRunning(isRunning) {
  const hadFocus = document.activeElement === page.stop || document.activeElement === page.send;
  page.stop.hidden = !isRunning;
  page.send.hidden = isRunning;
  page["new-chat"].disabled = isRunning;
  if (hadFocus) (isRunning ? page.stop : page.message).focus();
}

function send() {
  const asked = page.message.value.trim();
  if (running || !asked) return;
  if (!page.model.value) {
    page.settings.open = true;
    page.model.focus();
    return;
  }
  for (const field of [page["max-tokens"], page.temperature]) {
    if (!field.checkValidity()) {
      page.settings.open = true;
      field.reportValidity();
      return;
    }
  }
  page.message.value = "";
  ask(asked);
}

async function loadModels() {
  page.reload.disabled = true;
  const chosen = page.model.value;
  try {
    const { data } = await (await request("v1/models")).json();
    models = new Map(data.map((model) => [model.id, model]));
    page.model.replaceChildren(...data.map((model) => new Option(model.id, model.id)));
    if (models.has(chosen)) page.model.value = chosen;
    showModel();
  } catch (error) {
    page["model-facts"].textContent = error.message;
  }
  page.reload.disabled = false;
}

function showModel() {
  const model = models.get(page.model.value);
  page["model-facts"].textContent = model
    ? [
        describeCount(model.x_horde.workers, "worker"),
        `${model.context_length.toLocaleString("en")} tokens of context`,
        `replies up to ${model.top_provider.max_completion_tokens.toLocaleString("en")}`,
      ].join(" · ")
    : "No worker serves chat now. Reload in a while.";
}

function storeKey() {
  if (page["keep-key"].checked) sessionStorage.setItem(STORED_KEY, page.key.value);
  else sessionStorage.removeItem(STORED_KEY);
}

page.composer.addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
page.message.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
page.stop.addEventListener("click", () => running?.abort());
page["new-chat"].addEventListener("click", () => {
  exchanges = [];
  page.turns.replaceChildren();
  page.message.focus();
});
page.reload.addEventListener("click", loadModels);
page.model.addEventListener("change", showModel);
page.key.addEventListener("change", storeKey);
page["keep-key"].addEventListener("change", storeKey);

const wide = matchMedia("(min-width: 45.01rem)");
wide.addEventListener("change", () => (page.settings.open = wide.matches));
page.settings.open = wide.matches;
const stored = sessionStorage.getItem(STORED_KEY);
if (stored !== null) {
  page.key.value = stored;
  page["keep-key"].checked = true;
}
loadModels();
