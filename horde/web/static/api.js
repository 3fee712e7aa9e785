// SPDX-License-Identifier: AGPL-3.0-or-later
// The routes of the API, to be tried: a form for each, made from the document when it is opened.
import { ask, fillTable, isKey, make } from "./parts.js";
import { getKey, keepKey } from "./session.js";

const ANONYMOUS_KEY = "0000000000";
const find = (id) => document.getElementById(id);
let reading = null;

// Read once; a failure is forgotten, so that the next route that is opened tries again.
function readDocument() {
  reading ??= ask("/api/swagger.json", ANONYMOUS_KEY).catch((error) => {
    reading = null;
    throw error;
  });
  return reading;
}

const followReference = (swagger, schema) =>
  schema?.$ref ? swagger.definitions[schema.$ref.split("/").at(-1)] : schema;

function describeType(swagger, schema) {
  const found = followReference(swagger, schema) ?? {};
  if (found.type === "array") return `list of ${describeType(swagger, found.items)}`;
  const words = [found.enum ? found.enum.map((each) => JSON.stringify(each)).join(" or ") : (found.type ?? "anything")];
  if (found.minimum !== undefined) words.push(`from ${found.minimum}`);
  if (found.maximum !== undefined) words.push(`to ${found.maximum}`);
  if (found.default !== undefined) words.push(`else ${JSON.stringify(found.default)}`);
  return words.join(" ");
}

// Names, types and meanings of the fields of an object; null for anything else.
function buildFields(swagger, schema, title) {
  const found = followReference(swagger, schema);
  const object = found?.type === "array" ? followReference(swagger, found.items) : found;
  const fields = Object.entries(object?.properties ?? {});
  if (!fields.length) return null;
  const required = new Set(object.required ?? []);
  const table = make("table");
  const rows = fields.map(([name, field]) => [
    make("span", {}, make("code", { text: name }), required.has(name) ? " (needed)" : ""),
    describeType(swagger, field),
    (followReference(swagger, field)?.description ?? "").replaceAll("`", ""),
  ]);
  fillTable(table, [{ title: "Field" }, { title: "Type" }, { title: "Meaning" }], rows, "");
  const region = make("div", { className: "scroll", tabindex: "0", role: "region", "aria-label": title }, table);
  return make("details", {}, make("summary", { text: title }), region);
}

function buildInput(operation, parameter) {
  const id = `${operation}-${parameter.in}-${parameter.name}`;
  const input = parameter.enum || parameter.type === "boolean"
    ? make("select", { id }, make("option", { text: "" }), ...(parameter.enum ?? ["true", "false"]).map((each) => make("option", { text: String(each) })))
    : make("input", { id, autocomplete: "off", spellcheck: "false" });
  if (parameter.required) input.required = true;
  if (parameter.default !== undefined && input.tagName === "INPUT") input.placeholder = String(parameter.default);
  const hint = make("p", { className: "hint", id: `${id}-hint`, text: parameter.description ?? `${parameter.in} parameter` });
  input.setAttribute("aria-describedby", hint.id);
  const label = make("label", { for: id, text: `${parameter.name}${parameter.required ? " (needed)" : ""}` });
  return { parameter, input, field: make("div", { className: "field" }, label, input, hint) };
}

function buildRequest(path, method, inputs, body) {
  let address = `/api${path}`;
  const query = new URLSearchParams();
  const headers = {};
  for (const { parameter, input } of inputs) {
    const value = input.value.trim();
    if (parameter.in === "path") address = address.replace(`{${parameter.name}}`, encodeURIComponent(value));
    else if (value && parameter.in === "query") query.set(parameter.name, value);
    else if (value && parameter.in === "header") headers[parameter.name] = value;
  }
  if (body !== null) headers["Content-Type"] = "application/json";
  return { address: query.size ? `${address}?${query}` : address, method: method.toUpperCase(), headers, body };
}

const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;

// The key is left for its owner to fill in: what is copied gets pasted into reports.
function writeCommand({ address, method, headers, body }, takesKey) {
  const words = ["curl", "-s", ...(method === "GET" ? [] : ["-X", method]), quote(location.origin + address)];
  if (takesKey) words.push("-H", quote("apikey: KEY"));
  for (const [name, value] of Object.entries(headers)) words.push("-H", quote(`${name}: ${value}`));
  if (body !== null) words.push("-d", quote(body));
  return words.join(" ");
}

async function send(request, takesKey, answerBox) {
  const headers = { ...request.headers, ...(takesKey ? { apikey: getKey() || ANONYMOUS_KEY } : {}) };
  const startedAt = performance.now();
  answerBox.replaceChildren(make("p", { className: "hint", text: "Waiting for the answer." }));
  let answer;
  try {
    answer = await fetch(request.address, { method: request.method, headers, body: request.body, credentials: "omit", cache: "no-store" });
  } catch {
    answerBox.replaceChildren(make("p", { className: "problem", text: "The server cannot be reached." }));
    return;
  }
  const milliseconds = Math.round(performance.now() - startedAt);
  const text = await answer.text();
  let shown = text;
  try {
    shown = JSON.stringify(JSON.parse(text), null, 2);
  } catch { // shown as it came
  }
  const state = make("p", { text: `${answer.status} ${answer.statusText}`, className: `state ${answer.ok ? "good" : "bad"}` });
  answerBox.replaceChildren(state, make("p", { className: "hint", text: `after ${milliseconds} ms` }), make("pre", { text: shown, className: "answer", tabindex: "0" }));
}

async function fill(details) {
  const { path, method } = details.dataset;
  const swagger = await readDocument();
  const found = swagger.paths[path][method];
  const parameters = [...(swagger.paths[path].parameters ?? []), ...(found.parameters ?? [])];
  const takesKey = parameters.some((each) => each.name === "apikey");
  const inputs = parameters
    .filter((each) => each.in !== "body" && each.name !== "apikey" && each.name !== "X-Fields")
    .map((each) => buildInput(details.id, each));
  const bodySchema = parameters.find((each) => each.in === "body")?.schema;
  const example = followReference(swagger, bodySchema)?.example;
  const bodyBox = bodySchema && make("textarea", { id: `${details.id}-body`, rows: "8", spellcheck: "false" });
  if (bodyBox) bodyBox.value = JSON.stringify(example ?? {}, null, 2);
  const answerBox = make("div", { className: "stack", role: "status" });
  const command = make("pre", { tabindex: "0" });
  const build = () => buildRequest(path, method, inputs, bodyBox ? bodyBox.value : null);
  const tell = () => (command.textContent = writeCommand(build(), takesKey));
  const form = make("form", { className: "stack" },
    ...(inputs.length ? [make("div", { className: "form top" }, ...inputs.map((each) => each.field))] : []),
    ...(bodyBox ? [make("div", { className: "field" }, make("label", { for: bodyBox.id, text: "Body" }), bodyBox)] : []),
    make("div", { className: "actions" }, make("button", { text: "Send", type: "submit", className: method === "delete" ? "danger" : "main" })));
  form.addEventListener("input", tell);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(build(), takesKey, answerBox);
  });
  tell();
  const success = Object.entries(found.responses).find(([code]) => code.startsWith("2"))?.[1];
  const parts = [
    form, answerBox,
    make("details", {}, make("summary", { text: "As a command" }), command),
    buildFields(swagger, bodySchema, "Fields of the body"),
    buildFields(swagger, success?.schema, "Fields of the answer"),
  ];
  details.querySelector(".details").append(...parts.filter(Boolean));
}

for (const details of document.querySelectorAll(".operation")) {
  details.addEventListener("toggle", () => {
    if (!details.open || details.dataset.isFilled) return;
    details.dataset.isFilled = "yes";
    const problem = details.querySelector(".problem");
    fill(details).then(() => problem?.remove(), ({ message }) => {
      delete details.dataset.isFilled;
      const told = `${message} Close this route and open it again.`;
      if (problem) problem.textContent = told;
      else details.querySelector(".details").append(make("p", { className: "problem", role: "alert", text: told }));
    });
  });
}

find("settings").addEventListener("submit", (event) => event.preventDefault());
find("key").value = getKey();
find("key").addEventListener("change", () => {
  const key = find("key").value.trim();
  find("key").setCustomValidity(!key || isKey(key) ? "" : "The key holds characters that no key has.");
  if (find("key").reportValidity()) keepKey(key);
});
find("search").addEventListener("input", () => {
  const wanted = find("search").value.trim().toLowerCase();
  for (const topic of document.querySelectorAll(".topic")) {
    const operations = [...topic.querySelectorAll(".operation")];
    for (const each of operations) each.hidden = !each.querySelector("summary").textContent.toLowerCase().includes(wanted);
    topic.hidden = operations.every((each) => each.hidden);
  }
});
const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
if (target?.matches(".operation")) target.open = true;
