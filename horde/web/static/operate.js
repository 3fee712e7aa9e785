// SPDX-License-Identifier: AGPL-3.0-or-later
// What a moderator changes from the dashboard. Each part is read when it is opened.
import { confirmTwice, fillTable, formatNumber, formatSeconds, make, makeButton } from "./parts.js";
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
  fillTable(find("blocks"), [{ title: "Address" }, { title: "For" }, { title: "" }], rows, empty);
}

function setUpBlocks() {
  onOpen("blocks-part", loadBlocks);
  onSubmit("block", () => attempt(() => call("/api/v2/operations/ipaddr", {
    method: "POST",
    body: { ipaddr: value("block-address"), hours: Number(value("block-hours")), ...(value("block-reason") && { reason: value("block-reason") }) },
  }), `${value("block-address")} is refused.`, loadBlocks));
  find("block-look").addEventListener("click", () => attempt(async () => {
    const found = await call(`/api/v2/operations/ipaddr/${encodeURIComponent(value("block-address"))}`);
    showBlocks(found, "This address is not refused.");
  }, ""));
}

// Filters

async function loadFilters() {
  const rules = await call("/api/v2/filters");
  const rows = rules.map((rule) => {
    const drop = makeButton("Delete", () => attempt(() => call(`/api/v2/filters/${rule.id}`, { method: "DELETE" }), "The rule was deleted.", loadFilters), "danger");
    drop.setAttribute("aria-label", `Delete the rule ${rule.regex}`);
    return [make("code", { text: rule.regex }), String(rule.filter_type), rule.description ?? "", rule.replacement, drop];
  });
  fillTable(find("filters"), [{ title: "Expression" }, { title: "Type" }, { title: "Description" }, { title: "Becomes" }, { title: "" }], rows, "There are no rules.");
}

function setUpFilters() {
  onOpen("filters-part", loadFilters);
  onSubmit("filter", () => attempt(() => call("/api/v2/filters", {
    method: "PUT",
    body: {
      regex: value("filter-regex"), filter_type: Number(value("filter-type")), replacement: value("filter-replacement"),
      ...(value("filter-description") && { description: value("filter-description") }),
    },
  }), "The rule was added.", loadFilters));
  onSubmit("try", () => attempt(async () => {
    const found = await call("/api/v2/filters", { method: "POST", body: { prompt: value("try-prompt") } });
    const verdict = found.suspicion > 1 ? "It would be refused." : "It would be let through.";
    find("tried").textContent = `${verdict} Found: ${found.matches.join(", ") || "nothing"}.`;
  }, ""));
}

// Messages

async function loadMessages() {
  const messages = await call("/api/v2/workers/messages");
  const rows = messages.map((message) => {
    const drop = makeButton("Delete", () => attempt(() => call(`/api/v2/workers/messages/${message.id}`, { method: "DELETE" }), "The message was deleted.", loadMessages), "danger");
    drop.setAttribute("aria-label", `Delete the message ${message.message.slice(0, 40)}`);
    return [message.message, message.worker_id ?? message.worker_type ?? "all workers", message.origin, message.expiry, drop];
  });
  fillTable(find("messages"), [{ title: "Message" }, { title: "To" }, { title: "From" }, { title: "Until" }, { title: "" }], rows, "No message is being delivered.");
}

function setUpMessages() {
  onOpen("messages-part", loadMessages);
  onSubmit("message", () => attempt(() => call("/api/v2/workers/messages", {
    method: "POST",
    body: {
      message: value("message-text"), expiry: Number(value("message-hours")),
      ...(value("message-worker") ? { worker_id: value("message-worker") } : {}),
    },
  }), "The message will be delivered.", loadMessages));
}

// What was done

async function loadActs() {
  const acts = await call("/api/v2/operations/moderator_acts");
  const rows = acts.map((act) => [act.created, act.username, act.action, act.subject, act.reason ?? "", JSON.stringify(act.details)]);
  fillTable(find("acts"), [{ title: "When" }, { title: "Who" }, { title: "What" }, { title: "To" }, { title: "Why" }, { title: "Details" }], rows, "Nothing was done yet.");
}

export function setUpOperations(refresh) {
  setUpModes(refresh);
  setUpUsers();
  setUpBlocks();
  setUpFilters();
  setUpMessages();
  onOpen("acts-part", loadActs);
}
