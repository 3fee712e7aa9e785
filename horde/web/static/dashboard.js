// SPDX-License-Identifier: AGPL-3.0-or-later
// The operator's dashboard: the moment every few seconds, figures over time more rarely.
import { beginMessage, setUpOperations, showModes } from "./operate.js";
import { fillTable, formatBytes, formatFigure, formatNumber, formatSeconds, make, makeButton, redraw } from "./parts.js";
import { buildPlot } from "./plots.js";
import { attempt, call, startSession } from "./session.js";

const MOMENT_SECONDS = 5;
const SERIES_EVERY = 6; // moments
const find = (id) => document.getElementById(id);
const line = (name, label) => ({ name, label });

const PLOTS = [
  { title: "Queue", lines: [line("waiting", "Waiting"), line("processing", "Running")] },
  { title: "Seconds until a worker took a job", lines: [line("wait_50", "Half within"), line("wait_90", "90%"), line("wait_99", "99%")] },
  { title: "Seconds from then to the first token", lines: [line("first_50", "Half within"), line("first_90", "90%"), line("first_99", "99%")] },
  { title: "Jobs a minute", lines: [line("done", "Done"), line("faults", "Faulted")] },
  { title: "Tokens a minute", lines: [line("tokens", "Tokens")] },
  { title: "Workers online", lines: [line("workers", "Workers")] },
  { title: "Refusals a minute", lines: [line("refused", "All"), line("rate_limited", "By rate limits")] },
  { title: "Kudos a minute", lines: [line("gained", "Gained"), line("spent", "Spent")] },
  { title: "Postings not folded yet", lines: [line("unfolded", "Postings")] },
  { title: "Failed calls a minute", lines: [line("redis_failed", "Redis"), line("store_failed", "Store")] },
].map(buildPlot);

let ticks = 0;
let shownWindow = "hour";

function number(title) {
  return { title, isNumber: true };
}

function showNumbers(moment) {
  const waiting = moment.queue.reduce((sum, each) => sum + each.waiting, 0);
  const running = moment.queue.reduce((sum, each) => sum + each.processing, 0);
  find("waiting").textContent = formatNumber(waiting);
  find("running").textContent = formatNumber(running);
  find("workers-online").textContent = formatNumber(moment.worker_counts.online);
  find("threads").textContent = formatNumber(moment.worker_counts.thread);
  find("unfolded").textContent = formatNumber(moment.unfolded);
}

function makeState(isGood, good, bad) {
  return make("span", { text: isGood ? good : bad, className: `state ${isGood ? "good" : "bad"}` });
}

function showHealth(moment) {
  const { database, redis, store, nodes } = moment;
  const leader = nodes.find((node) => node.is_leader);
  const age = (node) => formatSeconds(node.age_seconds);
  const place = (node) => `${node.address ?? "this machine"}, process ${node.pid}`;
  const rows = [
    ["Database", makeState(!database.is_standby, "answers", "is a standby"),
      `${database.milliseconds} ms, ${database.connections} of ${database.max_connections} connections, ${formatBytes(database.size_bytes)}`],
    ["Redis", makeState(redis.is_reachable, "answers", "is away"),
      redis.is_reachable ? `${redis.milliseconds} ms, ${formatBytes(redis.used_bytes)}` : "Streams and shared caches rest, limits are counted by process."],
    ["Store", store.is_configured ? makeState(store.is_reachable, "answers", "failed") : make("span", { text: "none", className: "state" }),
      store.is_configured ? "" : "Chat takes no images, and long messages stay in the database."],
    ["Leader", makeState(Boolean(leader), "elected", "nobody"),
      leader ? `${place(leader)}, up for ${age(leader)}` : "No process runs the periodic jobs."],
    ["Kudos", makeState(moment.fold_lag_seconds < 60, "folded", "behind"),
      `${formatNumber(moment.unfolded)} postings, the oldest ${formatSeconds(moment.fold_lag_seconds)} old`],
    ["API processes", make("span", { text: formatNumber(nodes.length), className: "state" }),
      nodes.map((node) => `${place(node)} (${age(node)})`).join("; ")],
  ];
  fillTable(find("health"), [{ title: "Part" }, { title: "State" }, { title: "Details" }], rows, "");
}

function showQueue(queue) {
  const columns = [{ title: "Model" }, { title: "Class" }, number("Waiting"), number("Running"), number("Tokens asked for"), number("Oldest")];
  const rows = queue.map((each) => [
    each.model || "any", each.is_chat ? "chat" : "text", formatNumber(each.waiting), formatNumber(each.processing),
    formatNumber(each.tokens), each.oldest_seconds === null ? "–" : formatSeconds(each.oldest_seconds),
  ]);
  fillTable(find("queue"), columns, rows, "Nothing waits and nothing runs.");
}

function describeReasons(reasons) {
  const sorted = Object.entries(reasons).sort((one, other) => other[1] - one[1]);
  return sorted.map(([reason, count]) => `${REASON_NAMES[reason] ?? reason} ${formatNumber(count)}`).join(", ") || "–";
}

function makeLabelled(text, worker, act) {
  const button = makeButton(text, act, "small");
  button.setAttribute("aria-label", `${text} ${worker.name}`);
  return button;
}

// What a moderator does with a worker; `after` shows it as it is then.
function buildActs(worker, after) {
  const change = (body, done) => attempt(() => call(`/api/v2/workers/${worker.id}`, { method: "PUT", body }), `${worker.name} ${done}`, after);
  return make("div", { className: "actions", "data-id": worker.id },
    worker.maintenance
      ? makeLabelled("End maintenance", worker, () => change({ maintenance: false }, "takes jobs again."))
      : makeLabelled("Maintain", worker, () => change({ maintenance: true }, "is in maintenance.")),
    worker.paused
      ? makeLabelled("Unpause", worker, () => change({ paused: false }, "is paused no longer."))
      : makeLabelled("Pause", worker, () => change({ paused: true }, "is paused.")),
    makeLabelled("Message", worker, () => beginMessage(worker)));
}

function buildState(worker) {
  const [text, kind] = worker.paused ? ["paused", "bad"] : worker.maintenance ? ["maintenance", "warn"]
    : worker.isOffline ? ["offline", ""] : ["online", "good"];
  return make("span", { text, className: `state ${kind}` });
}

function buildName(worker) {
  return make("span", {}, make("bdi", { text: worker.name }), make("br"), make("span", { text: worker.owner, className: "hint" }));
}

// One that is not among the busiest, or offline.
async function findWorker() {
  const typed = find("worker-name").value.trim();
  const isId = /^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/i.test(typed);
  const found = await call(`/api/v2/workers/${isId ? "" : "name/"}${encodeURIComponent(typed)}`);
  const worker = { ...found, maintenance: found.maintenance_mode, isOffline: !found.online, owner: [found.owner, found.ipaddr].filter(Boolean).join(", ") };
  const row = [buildName(worker), buildState(worker), worker.models.join(", "), buildActs(worker, findWorker)];
  find("worker-found-part").hidden = false;
  redraw(find("worker-found"), () => fillTable(find("worker-found"), ["Worker", "State", "Models", ""].map((title) => ({ title })), [row], ""));
}

function showWorkers(workers, counts) {
  find("worker-note").textContent = counts.online > workers.length
    ? `The busiest ${formatNumber(workers.length)} of ${formatNumber(counts.online)}. ` : "";
  find("worker-note").textContent += `${formatNumber(counts.maintenance)} in maintenance, ${formatNumber(counts.paused)} paused.`;
  const columns = [{ title: "Worker" }, { title: "State" }, { title: "Models" }, number("Jobs"), number("Tokens/s"), number("Replies"), number("Dropped"), { title: "Faults by reason" }, { title: "" }];
  const rows = workers.map((worker) => {
    return [
      buildName(worker),
      buildState(worker),
      worker.models.join(", "),
      `${worker.processing}/${worker.threads}`,
      worker.speed === null ? "–" : formatNumber(worker.speed, 1),
      formatNumber(worker.fulfilments),
      formatNumber(worker.dropped),
      describeReasons(worker.faults),
      buildActs(worker, refresh),
    ];
  });
  redraw(find("workers"), () => fillTable(find("workers"), columns, rows, "No worker is online."));
}

// A code without a name is the status itself.
const REASON_NAMES = { none: "no reason given", lease_lapsed: "never came back", 429: "429 (rate limit)" };

function showReasons(id, title, sums, empty) {
  const rows = Object.entries(sums)
    .sort((one, other) => other[1] - one[1])
    .map(([reason, count]) => [REASON_NAMES[reason] ?? reason, formatNumber(count)]);
  fillTable(find(id), [{ title }, number("Times")], rows, empty);
}

function showKudos(gained, spent) {
  const reasons = [...new Set([...Object.keys(gained), ...Object.keys(spent)])].sort();
  const rows = reasons.map((reason) => [reason, formatNumber(gained[reason] ?? 0, 2), formatNumber(spent[reason] ?? 0, 2)]);
  fillTable(find("kudos"), [{ title: "Posting" }, number("Gained"), number("Spent")], rows, "No kudos moved.");
}

async function loadSeries() {
  const found = await call(`/dashboard/series?window=${shownWindow}`);
  for (const plot of PLOTS) plot.show(found.at, found.series);
  showReasons("faults", "Reason", found.faults, "No job faulted.");
  showReasons("refusals", "Code", found.refusals, "Nothing was refused.");
  showKudos(found.gained, found.spent);
  const last = (name) => found.series[name].findLast((each) => each !== null) ?? null;
  find("jobs-minute").textContent = formatFigure(last("done"));
  find("tokens-minute").textContent = formatFigure(last("tokens"));
  find("refused-minute").textContent = formatFigure(last("refused"));
}

async function load() {
  const moment = await call("/dashboard/moment");
  showNumbers(moment);
  showHealth(moment);
  showQueue(moment.queue);
  showWorkers(moment.workers, moment.worker_counts);
  showModes(moment.modes);
  find("moment").textContent = new Date(moment.now * 1000).toLocaleTimeString();
  if (ticks++ % SERIES_EVERY === 0) await loadSeries();
}

for (const button of document.querySelectorAll("[data-window]")) {
  button.addEventListener("click", () => {
    shownWindow = button.dataset.window;
    for (const each of document.querySelectorAll("[data-window]")) each.setAttribute("aria-pressed", String(each === button));
    attempt(loadSeries, "");
  });
}
find("worker-find").addEventListener("submit", (event) => {
  event.preventDefault();
  attempt(findWorker, "");
});
find("plots").append(...PLOTS.map((plot) => plot.figure));
const refresh = startSession({ load, seconds: MOMENT_SECONDS });
setUpOperations(refresh);
