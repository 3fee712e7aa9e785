// SPDX-License-Identifier: AGPL-3.0-or-later
// What somebody chose: kept in the browser, but for the key, which is kept in the tab.
import { ANONYMOUS_KEY } from "./front.js";
import { readJson } from "./request.js";

const STORED_KEY = "horde-chat-key";
const STORED = "horde-chat:settings";
const FIELDS = {
  model: "model", system: "system", maxTokens: "max-tokens", temperature: "temperature", topP: "top-p", seed: "seed", effort: "effort", format: "format",
  schema: "schema", tools: "tools", bestEffort: "best-effort",
};
const LONGEST = 100_000; // characters of a setting

const find = (id) => document.getElementById(id);

export class Settings {
  constructor(storage) {
    this.storage = storage;
    this.dialog = find("settings");
    this.key = find("key");
    this.model = find("model");
    this.#restore();
    find("fields").addEventListener("change", () => this.keep());
    this.model.addEventListener("change", () => this.keep());
    find("fields").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.check()) this.dialog.close();
    });
    this.dialog.addEventListener("close", () => this.keep());
    find("open-settings").addEventListener("click", () => this.open());
    find("close-settings").formNoValidate = true; // check() says it in the right place
  }

  open(field = null) {
    if (!this.dialog.open) this.dialog.showModal();
    if (field) {
      if (find("more").contains(field)) find("more").open = true;
      field.focus();
    }
  }

  // The values by name: text, but for bestEffort, which is a boolean.
  get values() {
    const entries = Object.entries(FIELDS).map(([name, id]) => [name, find(id).type === "checkbox" ? find(id).checked : find(id).value]);
    return { ...Object.fromEntries(entries), system: find("system").value.trim() };
  }

  readKey() {
    return this.key.value.trim() || ANONYMOUS_KEY;
  }

  // Whether everything can be sent; else what cannot is shown and has the focus.
  check() {
    const problem = find("settings-problem");
    problem.hidden = true;
    const number = [...find("fields").elements].find((field) => field.type === "number" && !field.checkValidity());
    if (number) {
      this.open(number);
      number.reportValidity();
      return false;
    }
    const { tools, format, schema } = this.values;
    const texts = [["tools", "Tools", tools.trim()], ["schema", "The schema", format === "json_schema" && (schema.trim() || "{")]];
    for (const [id, name, text] of texts.filter(([, , text]) => text)) {
      try {
        readJson(text, name);
      } catch (error) {
        this.open(find(id));
        problem.textContent = error.message;
        problem.hidden = false;
        return false;
      }
    }
    return true;
  }

  keep() {
    find("schema-field").hidden = find("format").value !== "json_schema";
    try {
      if (this.key.value) sessionStorage.setItem(STORED_KEY, this.key.value);
      else sessionStorage.removeItem(STORED_KEY);
      this.storage?.setItem(STORED, JSON.stringify(this.values));
    } catch {
      // a browser that keeps nothing: they hold as long as the page
    }
  }

  #restore() {
    let values = {};
    try {
      this.key.value = sessionStorage.getItem(STORED_KEY) ?? "";
      values = JSON.parse(this.storage?.getItem(STORED) ?? "{}") ?? {};
    } catch {
      // what is stored is none of ours
    }
    this.chosenModel = typeof values.model === "string" ? values.model.slice(0, 300) : "";
    for (const [name, id] of Object.entries(FIELDS)) {
      const field = find(id);
      if (name === "bestEffort") field.checked = values[name] === true;
      else if (name !== "model" && typeof values[name] === "string") field.value = values[name].slice(0, LONGEST);
    }
    find("schema-field").hidden = find("format").value !== "json_schema";
  }
}
