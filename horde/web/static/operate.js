// SPDX-License-Identifier: AGPL-3.0-or-later
// What a moderator changes from the dashboard. Each part is read when it is opened.
import { confirmTwice, fillTable, formatNumber, formatSeconds, make, makeButton, redraw } from "./parts.js";
import { attempt, call } from "./session.js";

const find = (id) => document.getElementById(id);
const value = (id) => find(id).value.trim();
const ROLES = ["trusted", "flagged", "customizer", "vpn", "service", "education", "special", "moderator"];
const MODES = ["invite_only", "raid", "maintenance"];
let user = null;

function onSubmit(id, act) {
  find(id).addEventListener("submit", (event) => {
    event.preventDefault();
    act();
  });
}

// What was typed goes once it is stored, and stays for another try when it is not.
function onStore(id, act, done, load) {
  onSubmit(id, () => attempt(async () => {
    await act();
    find(id).reset();
  }, typeof done === "string" ? done : done(), load));
}

function showList(id, columns, rows, empty) {
  redraw(find(id), () => fillTable(find(id), [...columns, ""].map((title) => ({ title })), rows, empty));
}

function makeDeleter(label, act, done, load) {
  const button = make("button", { text: "Delete", type: "button", className: "danger", "aria-label": label });
  confirmTwice(button, "Really delete it", () => attempt(act, done, load));
  return button;
}

function onOpen(id, load) {
  find(id).addEventListener("toggle", () => find(id).open && attempt(load, ""));
}

// Modes

export function showModes(modes) {
  for (const mode of MODES) {
    const box = find(`mode-${mode}`);
    if (box !== document.activeElement) box.checked = modes[mode];
  }
}

function setUpModes(refresh) {
  for (const mode of MODES) {
    const box = find(`mode-${mode}`);
    box.addEventListener("change", async () => {
      const body = { [`${mode}_mode`]: box.checked };
      const isDone = await attempt(() => call("/api/v2/status/modes", { method: "PUT", body }), "The mode was set.", refresh);
      if (!isDone) box.checked = !box.checked;
    });
  }
}

// Users

function showUser(found) {
  user = found;
  find("user").hidden = false;
  find("user-name").textContent = found.username;
  const facts = [
    ["Kudos", formatNumber(found.kudos)],
    ["Age", formatSeconds(found.account_age)],
    ["Workers", formatNumber(found.worker_count)],
    ["Suspicion", formatNumber(found.suspicious ?? 0)],
    ["Contact", found.contact ?? "–"],
    ["Deletion", found.deleted ? "marked for deletion" : "–"],
  ];
  find("user-facts").replaceChildren(...facts.flatMap(([name, text]) => [make("dt", { text: name }), make("dd", { text })]));
  for (const role of ROLES) find(`user-${role}`).checked = Boolean(found[role]);
  find("user-concurrency").value = found.concurrency;
  find("user-invited").value = found.worker_invited;
  find("user-comment").value = found.admin_comment ?? "";
  find("user-kudos").value = "";
  find("user-reason").value = "";
}

async function findUser() {
  const number = value("user-search").split("#").at(-1);
  showUser(await call(`/api/v2/users/${encodeURIComponent(number)}`));
}

function listUserChanges() {
  const changes = {};
  for (const role of ROLES) {
    if (find(`user-${role}`).checked !== Boolean(user[role])) changes[role] = find(`user-${role}`).checked;
  }
  if (Number(value("user-concurrency")) !== user.concurrency) changes.concurrency = Number(value("user-concurrency"));
  if (Number(value("user-invited")) !== user.worker_invited) changes.worker_invited = Number(value("user-invited"));
  if (value("user-comment") && value("user-comment") !== user.admin_comment) changes.admin_comment = value("user-comment");
  if (value("user-kudos")) changes.kudos = Number(value("user-kudos"));
  return changes;
}

function setUpUsers() {
  const put = (body) => call(`/api/v2/users/${user.id}`, { method: "PUT", body });
  const withReason = (body) => (value("user-reason") ? { ...body, reason: value("user-reason") } : body);
  const reload = async () => showUser(await call(`/api/v2/users/${user.id}`));
  onSubmit("user-find", () => attempt(findUser, ""));
  onSubmit("user", () => attempt(async () => {
    await put(withReason(listUserChanges()));
    await reload();
  }, "The account was changed."));
  find("user-suspicion").addEventListener("click", () => attempt(async () => {
    await put(withReason({ reset_suspicion: true }));
    await reload();
  }, "Its points of suspicion are forgotten."));
  confirmTwice(find("user-delete"), "Really delete it", () => attempt(async () => {
    const query = value("user-reason") ? `?reason=${encodeURIComponent(value("user-reason"))}` : "";
    await call(`/api/v2/users/${user.id}${query}`, { method: "DELETE" });
    await reload();
  }, "The account was marked for deletion."));
}

// Blocks

async function loadBlocks() {
  const networks = await call("/api/v2/operations/ipaddr");
  showBlocks(networks, "No network is refused. Single addresses are looked up above.");
}

function showBlocks(blocks, empty) {
  const rows = blocks.map(({ ipaddr, seconds }) => {
    const lift = makeButton("Lift", () => attempt(() => call("/api/v2/operations/ipaddr", { method: "DELETE", body: { ipaddr } }), `${ipaddr} is admitted again.`, loadBlocks));
    lift.setAttribute("aria-label", `Lift the block of ${ipaddr}`);
    return [ipaddr, formatSeconds(seconds), lift];
  });
  showList("blocks", ["Address", "For"], rows, empty);
}

function setUpBlocks() {
  onOpen("blocks-part", loadBlocks);
  onStore("block", () => call("/api/v2/operations/ipaddr", {
    method: "POST",
    body: { ipaddr: value("block-address"), hours: Number(value("block-hours")), ...(value("block-reason") && { reason: value("block-reason") }) },
  }), () => `${value("block-address")} is refused.`, loadBlocks);
  find("block-look").addEventListener("click", () => attempt(async () => {
    const found = await call(`/api/v2/operations/ipaddr/${encodeURIComponent(value("block-address"))}`);
    showBlocks(found, "This address is not refused.");
  }, ""));
}

// Filters

async function loadFilters() {
  const rules = await call("/api/v2/filters");
  const rows = rules.map((rule) => {
    const drop = makeDeleter(`Delete the rule ${rule.regex}`, () => call(`/api/v2/filters/${rule.id}`, { method: "DELETE" }), "The rule was deleted.", loadFilters);
    return [make("code", { text: rule.regex }), String(rule.filter_type), rule.description ?? "", rule.replacement, drop];
  });
  showList("filters", ["Expression", "Group", "Description", "Becomes"], rows, "There are no rules.");
}

function setUpFilters() {
  onOpen("filters-part", loadFilters);
  onStore("filter", () => call("/api/v2/filters", {
    method: "PUT",
    body: {
      regex: value("filter-regex"), filter_type: Number(value("filter-type")), replacement: value("filter-replacement"),
      ...(value("filter-description") && { description: value("filter-description") }),
    },
  }), "The rule was added.", loadFilters);
  onSubmit("try", () => attempt(async () => {
    const found = await call("/api/v2/filters", { method: "POST", body: { prompt: value("try-prompt") } });
    find("tried").textContent = `${formatNumber(found.suspicion)} of 2 groups match. Found: ${found.matches.join(", ") || "nothing"}.`;
  }, ""));
}

// Messages

async function loadMessages() {
  const messages = await call("/api/v2/workers/messages");
  const rows = messages.map((message) => {
    const drop = makeDeleter(`Delete the message ${message.message.slice(0, 40)}`, () => call(`/api/v2/workers/messages/${message.id}`, { method: "DELETE" }), "The message was deleted.", loadMessages);
    return [message.message, message.worker_id ?? message.worker_type ?? "all workers", message.origin, message.expiry, drop];
  });
  showList("messages", ["Message", "To", "From", "Until"], rows, "No message is being delivered.");
}

function setUpMessages() {
  onOpen("messages-part", loadMessages);
  onStore("message", () => call("/api/v2/workers/messages", {
    method: "POST",
    body: {
      message: value("message-text"), expiry: Number(value("message-hours")),
      ...(value("message-worker") ? { worker_id: value("message-worker") } : {}),
    },
  }), "The message will be delivered.", loadMessages);
}

// Write to the owner of a worker: the form below, with its id in it.
export function beginMessage(worker) {
  find("messages-part").open = true;
  find("message-worker").value = worker.id;
  find("message-text").focus();
}

// Evidence

const REASONS = { filter_rejection: "refused by the filters", model_rejection: "refused for its model", worker_csam: "reported by a worker" };
const TEXTS = { none: "No text was kept.", unavailable: "The store does not hand the text out now.", deleting: "The text is deleted.", deleted: "The text is deleted." };

function buildNotes(event) {
  const notes = make("ul", { className: "notes" });
  const add = (note) => notes.append(make("li", { dir: "auto" }, `${note.note} `, make("span", { text: `– ${note.username}, ${note.created}`, className: "hint" })));
  event.notes.forEach(add);
  const input = make("input", { maxlength: 2000, required: "", "aria-label": `Note on ${event.id}`, placeholder: "Note for moderators" });
  const form = make("form", { className: "line" }, input, make("button", { text: "Note", type: "submit" }));
  form.addEventListener("submit", (submitted) => {
    submitted.preventDefault();
    attempt(async () => {
      add(await call(`/api/v2/operations/moderation/prompts/${event.id}/notes`, { method: "POST", body: { note: input.value } }));
      input.value = "";
    }, "The note was added.");
  });
  return [notes, form];
}

function buildEvent(event) {
  const facts = [
    ["When", event.created], ["Account", event.user_id ?? "–"], ["Address", event.ipaddr ?? "–"], ["Worker", event.worker_id ?? "–"],
    ["Models", event.models.join(", ") || "any"], ...(event.proxied_account ? [["For", event.proxied_account]] : []),
  ];
  const text = event.prompts
    ? make("pre", { text: event.prompts.submitted, className: "quote", tabindex: "0", dir: "auto", role: "group", "aria-label": "The prompt" })
    : make("p", { text: TEXTS[event.text] ?? "The text comes later.", className: "hint" });
  const list = make("dl", { className: "facts" }, ...facts.flatMap(([name, fact]) => [make("dt", { text: name }), make("dd", { text: fact })]));
  return make("article", { className: "card" }, make("h3", { text: `${event.id}: ${REASONS[event.reason] ?? event.reason}` }), list, text, ...buildNotes(event));
}

const EVENTS_A_READ = 20;
let oldest = null;

async function readEvidence() {
  const query = new URLSearchParams({ limit: EVENTS_A_READ });
  for (const [name, asked] of [["user_id", value("evidence-user").split("#").at(-1)], ["ipaddr", value("evidence-address")], ["before_id", oldest]]) {
    if (asked) query.set(name, asked);
  }
  const events = await call(`/api/v2/operations/moderation/prompts?${query}`);
  find("evidence-more").hidden = events.length < EVENTS_A_READ;
  const isFirst = oldest === null;
  oldest = events.at(-1)?.id ?? oldest;
  const shown = events.map(buildEvent);
  if (!isFirst) find("events").append(...shown);
  else find("events").replaceChildren(...(shown.length ? shown : [make("p", { text: "There is none." })]));
}

function setUpEvidence() {
  onSubmit("evidence", () => attempt(() => {
    oldest = null;
    return readEvidence();
  }, ""));
  find("evidence-more").addEventListener("click", async () => {
    await attempt(readEvidence, "");
    if (find("evidence-more").hidden) find("events").focus(); // the button is gone
  });
}

// What was done

async function loadActs() {
  const acts = await call("/api/v2/operations/moderator_acts");
  const rows = acts.map((act) => [act.created, act.username, act.action, act.subject, act.reason ?? "", JSON.stringify(act.details)]);
  fillTable(find("acts"), ["When", "Who", "What", "To", "Why", "Details"].map((title) => ({ title })), rows, "Nothing was done yet.");
}

export function setUpOperations(refresh) {
  setUpModes(refresh);
  setUpUsers();
  setUpBlocks();
  setUpFilters();
  setUpMessages();
  setUpEvidence();
  onOpen("acts-part", loadActs);
}
