// SPDX-License-Identifier: AGPL-3.0-or-later
// The account of a key. The key is kept in the tab and sent as a header only.
import { ask, draw, fillTable, formatNumber, formatSeconds, isKey, make, makeButton, Refusal } from "./parts.js";

const STORED_KEY = "horde-key";
const REFRESH_SECONDS = 20;
const DAYS = 14;
const REASONS = {
  GENERATION: "Replies asked for and given",
  UPTIME_REWARD: "Being online",
  EVALUATION_PROMOTION: "Becoming trusted",
  TRANSFER: "Transfers",
  ADMIN_ADJUSTMENT: "Changes by an administrator",
  AWARD: "Awards",
  STYLE_REWARD: "Styles",
  FLOOR_ADJUSTMENT: "Debts forgiven",
  RECONCILIATION: "Corrections",
};

const find = (id) => document.getElementById(id);
let key = sessionStorage.getItem(STORED_KEY) ?? "";
let timer = null;

const call = (path, options) => ask(path, key, options);

function say(text) {
  find("said").textContent = text;
}

async function attempt(act, done) {
  try {
    await act();
    say(done);
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    say(error.message);
  }
  await load();
}

function showFlow(days) {
  const [width, height, base] = [700, 180, 90];
  const step = width / DAYS;
  const most = Math.max(1, ...days.map((day) => Math.max(day.gained, day.spent)));
  const bar = (day, index, amount, className) => {
    const tall = (amount / most) * (base - 22);
    const y = className === "up" ? base - tall : base;
    return draw("rect", { class: className, x: index * step + 6, y, width: step - 12, height: tall, rx: 2 });
  };
  const chart = draw("svg", { class: "chart", viewBox: `0 0 ${width} ${height + 16}`, role: "img" });
  chart.append(draw("title"));
  chart.firstChild.textContent = `Kudos gained and spent on each of the last ${DAYS} days`;
  chart.append(draw("line", { class: "axis", x1: 0, x2: width, y1: base, y2: base }));
  days.forEach((day, index) => {
    if (day.gained) chart.append(bar(day, index, day.gained, "up"));
    if (day.spent) chart.append(bar(day, index, day.spent, "down"));
    const label = draw("text", { x: index * step + step / 2, y: height + 10, "text-anchor": "middle" });
    label.textContent = day.day.slice(8);
    chart.append(label);
  });
  find("chart").replaceChildren(chart);
}

function showReasons(days) {
  const sums = new Map();
  for (const { reasons } of days) {
    for (const [reason, amount] of Object.entries(reasons)) {
      const name = reason.replace(/^-/, "");
      const sum = sums.get(name) ?? { gained: 0, spent: 0 };
      sum[reason.startsWith("-") ? "spent" : "gained"] += amount;
      sums.set(name, sum);
    }
  }
  const rows = [...sums].map(([reason, sum]) => [REASONS[reason] ?? reason, formatNumber(sum.gained, 2), formatNumber(sum.spent, 2)]);
  const columns = [{ title: "Reason" }, { title: "Gained", isNumber: true }, { title: "Spent", isNumber: true }];
  fillTable(find("reasons"), columns, rows, "Nothing was gained or spent.");
}

function buildDays(found) {
  const today = new Date();
  return Array.from({ length: DAYS }, (_, index) => {
    const moment = new Date(today.getTime() - (DAYS - 1 - index) * 86_400_000);
    const day = moment.toISOString().slice(0, 10);
    const reasons = found[day] ?? {};
    const sum = (isSpent) =>
      Object.entries(reasons).reduce((total, [reason, amount]) => total + (reason.startsWith("-") === isSpent ? amount : 0), 0);
    return { day, reasons, gained: sum(false), spent: sum(true) };
  });
}

function showRequests(requests) {
  const columns = [{ title: "Request" }, { title: "Model" }, { title: "State" }, { title: "Age", isNumber: true }, { title: "" }];
  const rows = requests.map((request) => {
    const state = [request.waiting && `${request.waiting} waiting`, request.processing && `${request.processing} running`, request.finished && `${request.finished} done`];
    const path = `/api/v2/generate/${request.is_chat ? "chat" : "text"}/status/${request.id}`;
    const cancel = makeButton("Cancel", () => attempt(() => call(path, { method: "DELETE" }), "The request was cancelled."));
    cancel.setAttribute("aria-label", `Cancel request ${request.id}`);
    return [request.id.slice(0, 8), request.models.join(", ") || "any", state.filter(Boolean).join(", "), formatSeconds(request.age_seconds), cancel];
  });
  fillTable(find("requests"), columns, rows, "None.");
}

function describeState(worker) {
  if (worker.paused) return ["paused", "bad"];
  if (worker.maintenance) return ["maintenance", "warn"];
  return worker.is_online ? ["online", "good"] : ["offline", ""];
}

function buildWorker(worker) {
  const [state, kind] = describeState(worker);
  const facts = [
    ["Models", worker.models.join(", ") || "–"],
    ["Speed", worker.is_measured ? `${formatNumber(worker.speed, 1)} tokens a second` : "not measured"],
    ["Replies", formatNumber(worker.fulfilments)],
    ["Jobs dropped", formatNumber(worker.dropped)],
    ["Kudos earned", formatNumber(worker.kudos)],
    ["Online", formatSeconds(worker.uptime)],
    ...(worker.maintenance ? [["Message", worker.maintenance_msg]] : []),
  ];
  const list = make("dl", { className: "facts" });
  for (const [name, value] of facts) list.append(make("dt", { text: name }), make("dd", { text: value }));
  const change = (body, done) => attempt(() => call(`/api/v2/workers/${worker.id}`, { method: "PUT", body }), done);
  const toggle = worker.maintenance
    ? makeButton("End maintenance", () => change({ maintenance: false }, `${worker.name} takes jobs again.`))
    : makeButton("Begin maintenance", () => change({ maintenance: true }, `${worker.name} finishes what it has and takes nothing new.`));
  toggle.setAttribute("aria-label", `${toggle.textContent} of ${worker.name}`);
  const title = make("h3", { text: worker.name });
  return make("article", { className: "card" }, title, make("p", { text: state, className: `state ${kind}` }), list, make("div", { className: "actions" }, toggle));
}

function showWorkers(workers) {
  const box = find("workers");
  if (box.contains(document.activeElement) && document.activeElement.matches("input")) return;
  box.className = "pair";
  box.replaceChildren(...workers.map(buildWorker));
  if (workers.length) return;
  box.append(make("p", {}, "You offer none. ", make("a", { text: "How to offer one", href: "/#offer" })));
}

function showShared(keys) {
  const columns = [{ title: "Key" }, { title: "Name" }, { title: "Left", isNumber: true }, { title: "Used", isNumber: true }, { title: "Until" }, { title: "" }];
  const rows = keys.map((shared) => {
    const revoke = makeButton("Revoke", () => attempt(() => call(`/api/v2/sharedkeys/${shared.id}`, { method: "DELETE" }), "The shared key was revoked."), "danger");
    revoke.setAttribute("aria-label", `Revoke the shared key ${shared.name ?? shared.id}`);
    return [make("code", { text: shared.id }), shared.name ?? "", shared.kudos < 0 ? "any" : formatNumber(shared.kudos), formatNumber(shared.utilized), shared.expiry?.slice(0, 10) ?? "for ever", revoke];
  });
  fillTable(find("shared"), columns, rows, "None.");
}

async function load() {
  const overview = await call("/account/overview");
  find("alias").textContent = overview.alias;
  find("roles").textContent = overview.roles.join(", ");
  find("kudos").textContent = formatNumber(overview.kudos);
  find("held").textContent = formatNumber(overview.held);
  find("online").textContent = formatNumber(overview.workers.filter((worker) => worker.is_online).length);
  find("in-flight").textContent = formatNumber(overview.requests.length);
  const days = buildDays(overview.days);
  showFlow(days);
  showReasons(days);
  showRequests(overview.requests);
  showWorkers(overview.workers);
  showShared(overview.sharedkeys);
}

function show(isOpen) {
  find("login").hidden = isOpen;
  find("account").hidden = !isOpen;
  clearInterval(timer);
  if (isOpen) timer = setInterval(() => document.hidden || load().catch((error) => say(error.message)), REFRESH_SECONDS * 1000);
}

async function open() {
  try {
    await load();
    sessionStorage.setItem(STORED_KEY, key);
    show(true);
  } catch (error) {
    if (!(error instanceof Refusal)) console.error(error);
    sessionStorage.removeItem(STORED_KEY);
    const problem = find("login-problem");
    problem.textContent = error instanceof Refusal ? error.message : "This page failed. Reload it.";
    problem.hidden = false;
    show(false);
  }
}

find("login").addEventListener("submit", (event) => {
  event.preventDefault();
  key = find("key").value.trim();
  find("key").value = "";
  find("login-problem").hidden = isKey(key);
  find("login-problem").textContent = "The key holds characters that no key has.";
  if (isKey(key)) open();
});
find("sign-out").addEventListener("click", () => {
  key = "";
  sessionStorage.removeItem(STORED_KEY);
  location.reload();
});
find("share").addEventListener("submit", (event) => {
  event.preventDefault();
  const body = { kudos: find("share-kudos").valueAsNumber, expiry: find("share-days").valueAsNumber };
  const name = find("share-name").value.trim();
  attempt(() => call("/api/v2/sharedkeys", { method: "PUT", body: name ? { ...body, name } : body }), "The shared key was made.");
});
find("reset").addEventListener("click", () => {
  const button = find("reset");
  if (button.textContent !== "Really: the old key stops working") {
    button.textContent = "Really: the old key stops working";
    return;
  }
  button.textContent = "Make a new key";
  attempt(async () => {
    key = (await call("/account/key", { method: "POST" })).api_key;
    sessionStorage.setItem(STORED_KEY, key);
    find("new-key-text").textContent = key;
    find("new-key").hidden = false;
  }, "Your key was replaced.");
});

if (isKey(key)) open();
else show(false);
