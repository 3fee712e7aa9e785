// SPDX-License-Identifier: AGPL-3.0-or-later
// The account of a key: what it gained, spent and has, and what its owner changes.
import {
  confirmTwice, draw, fillTable, formatFigure, formatNumber, formatSeconds, make, makeButton, redraw,
} from "./parts.js";
import { attempt, call, keepKey, say, startSession } from "./session.js";

const REFRESH_SECONDS = 20;
const DAYS = 14;
const REASONS = {
  GENERATION: "Replies asked for and given",
  UPTIME_REWARD: "Being online",
  TRANSFER: "Transfers",
  AWARD: "Awards",
  STYLE_REWARD: "Styles",
  ADMIN_ADJUSTMENT: "Changes by an administrator",
  EVALUATION_PROMOTION: "Becoming trusted",
  FLOOR_ADJUSTMENT: "Debts forgiven",
  RECONCILIATION: "Corrections",
};
const ORDER = Object.keys(REASONS);

const find = (id) => document.getElementById(id);
const number = (title) => ({ title, isNumber: true });
let account = null;
let editedKey = null;

// Kudos

function getColour(reason) {
  const place = ORDER.indexOf(reason);
  return `plot-${Math.min(place < 0 ? 5 : place, 5)}`;
}

function buildDays(found) {
  const today = new Date();
  return Array.from({ length: DAYS }, (_, index) => {
    const moment = new Date(today.getTime() - (DAYS - 1 - index) * 86_400_000);
    const day = moment.toISOString().slice(0, 10);
    const entries = Object.entries(found[day] ?? {});
    const pick = (isSpent) =>
      entries
        .filter(([reason]) => reason.startsWith("-") === isSpent)
        .map(([reason, amount]) => ({ reason: reason.replace(/^-/, ""), amount }));
    return { day, gained: pick(false), spent: pick(true) };
  });
}

const sum = (parts) => parts.reduce((total, part) => total + part.amount, 0);

// Bars above the line for what was gained and below it for what was spent, a piece for each reason.
function showFlow(days) {
  const [width, height, base, left] = [700, 190, 95, 80];
  const step = (width - left) / DAYS;
  const most = Math.max(1, ...days.map((day) => Math.max(sum(day.gained), sum(day.spent))));
  const scale = (base - 12) / most;
  const chart = draw("svg", { class: "chart", viewBox: `0 0 ${width} ${height + 18}`, role: "img" });
  const title = draw("title");
  title.textContent = `Kudos gained and spent on each of the last ${DAYS} days; the table has the sums`;
  chart.append(title);
  const write = (text, x, y, anchor) => {
    const label = draw("text", { x, y, "text-anchor": anchor });
    label.textContent = text;
    chart.append(label);
  };
  for (const [value, y] of [[most, 12], [0, base], [-most, height - 12]]) {
    chart.append(draw("line", { class: "axis", x1: left, x2: width, y1: y, y2: y }));
    write(`${value < 0 ? "-" : ""}${formatFigure(Math.abs(value))}`, left - 8, y + 4, "end");
  }
  days.forEach((day, index) => {
    const x = left + index * step + step * 0.15;
    for (const [parts, direction] of [[day.gained, -1], [day.spent, 1]]) {
      let from = base;
      for (const part of parts) {
        const tall = part.amount * scale;
        const y = direction < 0 ? from - tall : from;
        const bar = draw("rect", { class: getColour(part.reason), x, y, width: step * 0.7, height: tall });
        const hint = draw("title");
        hint.textContent = `${day.day}: ${REASONS[part.reason] ?? part.reason}, ${formatNumber(part.amount, 2)}`;
        bar.append(hint);
        chart.append(bar);
        from += direction * tall;
      }
    }
    write(day.day.slice(8), left + index * step + step / 2, height + 14, "middle");
  });
  find("chart").replaceChildren(chart);
}

function showReasons(days) {
  const sums = new Map();
  for (const day of days) {
    for (const side of ["gained", "spent"]) {
      for (const { reason, amount } of day[side]) {
        const found = sums.get(reason) ?? { gained: 0, spent: 0 };
        found[side] += amount;
        sums.set(reason, found);
      }
    }
  }
  const rows = [...sums].map(([reason, found]) => [
    make("span", {}, make("span", { className: `swatch ${getColour(reason)}` }), REASONS[reason] ?? reason),
    formatNumber(found.gained, 2),
    formatNumber(found.spent, 2),
  ]);
  fillTable(find("reasons"), [{ title: "Reason" }, number("Gained"), number("Spent")], rows, "Nothing was gained or spent.");
}

// Requests

function showRequests(requests, reservations) {
  const columns = [{ title: "Request" }, { title: "Model" }, { title: "State" }, number("Age"), { title: "" }];
  const rows = requests.map((request) => {
    const state = [
      request.waiting && `${request.waiting} waiting`,
      request.processing && `${request.processing} running`,
      request.finished && `${request.finished} done`,
    ];
    const path = `/api/v2/generate/${request.is_chat ? "chat" : "text"}/status/${request.id}`;
    const act = () => call(path, { method: "DELETE" });
    const cancel = makeButton("Cancel", () => attempt(act, "The request was cancelled.", refresh));
    cancel.setAttribute("aria-label", `Cancel request ${request.id.slice(0, 8)}`);
    return [
      request.id.slice(0, 8), request.models.join(", ") || "any", state.filter(Boolean).join(", "),
      formatSeconds(request.age_seconds), cancel,
    ];
  });
  redraw(find("requests"), () => fillTable(find("requests"), columns, rows, "Nothing of yours waits or runs."));
  const held = reservations.map((hold) => [
    `Request ${hold.id.split(":").at(-1).slice(0, 8)}`, formatNumber(hold.amount, 2), formatSeconds(hold.age_seconds),
  ]);
  fillTable(find("reservations"), [{ title: "For" }, number("Kudos"), number("Age")], held, "No kudos are held.");
}

// Workers

function describeState(worker) {
  if (worker.paused) return ["paused by a moderator", "bad"];
  if (worker.maintenance) return ["maintenance", "warn"];
  return worker.is_online ? ["online", "good"] : ["offline", ""];
}

const FAULTS = { none: "no reason given", lease_lapsed: "never came back", unknown: "own words" };

function describeFaults(faults) {
  const sorted = Object.entries(faults).sort((one, other) => other[1] - one[1]);
  return sorted.map(([reason, count]) => `${FAULTS[reason] ?? reason}: ${formatNumber(count)}`).join(", ") || "none";
}

function buildMessages(worker) {
  return worker.messages.map((note) => {
    const item = make("li", { dir: "auto" }, `${note.message} `, make("span", { text: `– ${note.origin}`, className: "hint" }));
    if (note.is_own) {
      const act = () => call(`/api/v2/workers/messages/${note.id}`, { method: "DELETE" });
      const drop = makeButton("Delete", () => attempt(act, "The message was deleted.", refresh), "small");
      drop.setAttribute("aria-label", `Delete the message ${note.message.slice(0, 40)}`);
      item.append(" ", drop);
    }
    return item;
  });
}

function buildMessageForm(worker) {
  const input = make("input", { maxlength: 10_240, required: "", "aria-label": `Message to ${worker.name}`, placeholder: "Message to the worker, for 12 hours" });
  const form = make("form", { className: "line" }, input, make("button", { text: "Send", type: "submit" }));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    attempt(async () => {
      await call("/api/v2/workers/messages", { method: "POST", body: { worker_id: worker.id, message: input.value } });
      input.value = "";
    }, "The worker is told at its next pop.", refresh);
  });
  return form;
}

function buildWorker(worker) {
  const [state, kind] = describeState(worker);
  const facts = [
    ["Models", worker.models.join(", ") || "–"],
    ["Speed", worker.is_measured ? `${formatNumber(worker.speed, 1)} tokens a second` : "not measured yet"],
    ["Replies", formatNumber(worker.fulfilments)],
    ["Jobs dropped", formatNumber(worker.dropped)],
    ["Faults by reason", describeFaults(worker.faults)],
    ["Kudos earned", formatNumber(worker.kudos)],
    ["Online in all", formatSeconds(worker.uptime)],
    ...(worker.maintenance ? [["Maintenance", worker.maintenance_msg]] : []),
  ];
  const list = make("dl", { className: "facts" });
  for (const [name, value] of facts) list.append(make("dt", { text: name }), make("dd", { text: value }));
  const change = (body, done) => attempt(() => call(`/api/v2/workers/${worker.id}`, { method: "PUT", body }), done, refresh);
  const toggle = worker.maintenance
    ? makeButton("End maintenance", () => change({ maintenance: false }, `${worker.name} takes jobs again.`))
    : makeButton("Begin maintenance", () => change({ maintenance: true }, `${worker.name} finishes what it has and takes nothing new.`));
  toggle.setAttribute("aria-label", `${toggle.textContent} of ${worker.name}`);
  const remove = make("button", { text: "Delete", type: "button", className: "danger", "aria-label": `Delete ${worker.name}` });
  confirmTwice(remove, "Really delete it", () =>
    attempt(() => call(`/api/v2/workers/${worker.id}`, { method: "DELETE" }), `${worker.name} was deleted.`, refresh));
  const messages = worker.messages.length ? [make("ul", { className: "notes" }, ...buildMessages(worker))] : [];
  return make("article", { className: "card", "data-id": worker.id },
    make("h3", { text: worker.name, dir: "auto" }), make("p", { text: state, className: `state ${kind}` }), list, ...messages,
    buildMessageForm(worker), make("div", { className: "actions" }, toggle, ...(worker.is_online ? [] : [remove])));
}

function showWorkers(workers) {
  const box = find("workers");
  const none = make("p", {}, "You offer none. ", make("a", { text: "How to offer one", href: "/#offer" }));
  redraw(box, () => box.replaceChildren(...(workers.length ? workers.map(buildWorker) : [none])));
}

// Shared keys

function edit(shared) {
  editedKey = shared;
  find("share-heading").textContent = shared ? `Change ${shared.name ?? shared.id}` : "A new one";
  find("share-save").textContent = shared ? "Save" : "Create";
  find("share-cancel").hidden = !shared;
  find("share-name").value = shared?.name ?? "";
  find("share-kudos").value = shared ? shared.kudos : 1000;
  find("share-days").value = shared && !shared.expiry ? -1 : 30;
  if (shared) find("share-name").focus();
}

function saveShared() {
  const name = find("share-name").value.trim();
  const body = { kudos: find("share-kudos").valueAsNumber, expiry: find("share-days").valueAsNumber, ...(name && { name }) };
  const [path, method, done] = editedKey
    ? [`/api/v2/sharedkeys/${editedKey.id}`, "PATCH", "The shared key was changed."]
    : ["/api/v2/sharedkeys", "PUT", "The shared key was made."];
  return attempt(async () => {
    await call(path, { method, body });
    edit(null);
  }, done, refresh);
}

function showShared(keys) {
  const columns = [{ title: "Key" }, { title: "Name" }, number("Left"), number("Used"), { title: "Until" }, { title: "" }];
  const rows = keys.map((shared) => {
    const name = shared.name ?? shared.id;
    const change = makeButton("Change", () => edit(shared));
    change.setAttribute("aria-label", `Change the shared key ${name}`);
    const revoke = make("button", { text: "Revoke", type: "button", className: "danger", "aria-label": `Revoke the shared key ${name}` });
    confirmTwice(revoke, "Really revoke it", () =>
      attempt(() => call(`/api/v2/sharedkeys/${shared.id}`, { method: "DELETE" }), "The shared key was revoked.", refresh));
    return [
      make("code", { text: shared.id }), shared.name ?? "", shared.kudos < 0 ? "any" : formatNumber(shared.kudos),
      formatNumber(shared.utilized), shared.expiry ?? "for ever", make("div", { className: "actions" }, change, revoke),
    ];
  });
  redraw(find("shared"), () => fillTable(find("shared"), columns, rows, "You share none."));
}

// Kudos given. Sent again after a failure, the same gift moves nothing twice.

let giftKey = null;

function makeGiftKey() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

function give() {
  giftKey ??= makeGiftKey();
  const body = { username: find("transfer-to").value.trim(), amount: find("transfer-amount").valueAsNumber };
  return attempt(async () => {
    await call("/api/v2/kudos/transfer", { method: "POST", body, headers: { "Idempotency-Key": giftKey } });
    giftKey = null;
    find("transfer-to").value = "";
  }, `${formatNumber(body.amount)} kudos were given to ${body.username}.`, refresh);
}

// Settings

let shownSettings = null;

function showSettings(settings) {
  const isSame = JSON.stringify(settings) === JSON.stringify(shownSettings);
  if (isSame) return; // somebody may be changing them
  shownSettings = settings;
  find("set-username").value = settings.username;
  find("set-contact").value = settings.contact ?? "";
  find("set-public_workers").checked = settings.public_workers;
}

function saveSettings() {
  const { settings } = account;
  const changes = {};
  const [name, contact] = [find("set-username").value.trim(), find("set-contact").value.trim()];
  if (name !== settings.username) changes.username = name;
  if (contact && contact !== settings.contact) changes.contact = contact;
  if (find("set-public_workers").checked !== settings.public_workers) changes.public_workers = find("set-public_workers").checked;
  if (!Object.keys(changes).length) return say("There is nothing to save.");
  return attempt(() => call(`/api/v2/users/${account.id}`, { method: "PUT", body: changes }), "The settings were saved.", refresh);
}

function showDeletion(isDeleted) {
  const [shown, hidden] = isDeleted ? ["undelete", "delete"] : ["delete", "undelete"];
  const hadFocus = document.activeElement === find(hidden);
  find(shown).hidden = false;
  find(hidden).hidden = true;
  if (hadFocus) find(shown).focus();
}

async function load() {
  account = await call("/account/overview");
  find("alias").textContent = account.alias;
  find("roles").textContent = account.roles.join(", ");
  find("to-dashboard").hidden = !account.roles.includes("moderator");
  find("kudos").textContent = formatNumber(account.kudos);
  find("held").textContent = formatNumber(account.held);
  find("online").textContent = formatNumber(account.workers.filter((worker) => worker.is_online).length);
  find("in-flight").textContent = formatNumber(account.requests.length);
  const days = buildDays(account.days);
  showFlow(days);
  showReasons(days);
  showRequests(account.requests, account.reservations);
  showWorkers(account.workers);
  showShared(account.sharedkeys);
  showSettings(account.settings);
  showDeletion(account.is_deleted);
}

function onSubmit(id, act) {
  find(id).addEventListener("submit", (event) => {
    event.preventDefault();
    act();
  });
}

onSubmit("transfer", give);
for (const id of ["transfer-to", "transfer-amount"]) find(id).addEventListener("input", () => (giftKey = null));
onSubmit("share", saveShared);
find("share-cancel").addEventListener("click", () => {
  edit(null);
  find("share-name").focus(); // the button is gone
});
onSubmit("settings", saveSettings);
confirmTwice(find("reset"), "Really: the old key stops working", () =>
  attempt(async () => {
    const { api_key: made } = await call("/account/key", { method: "POST" });
    keepKey(made);
    find("new-key-text").textContent = made;
    find("new-key").hidden = false;
  }, "Your key was replaced.", refresh));
confirmTwice(find("delete"), "Really delete the account", () =>
  attempt(() => call(`/api/v2/users/${account.id}`, { method: "DELETE" }), "The account is marked for deletion.", refresh));
find("undelete").addEventListener("click", () =>
  attempt(() => call(`/api/v2/users/${account.id}`, { method: "PUT", body: { undelete: true } }), "The account stays.", refresh));

const refresh = startSession({ load, seconds: REFRESH_SECONDS });
