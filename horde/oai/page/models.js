// SPDX-License-Identifier: AGPL-3.0-or-later
// The models that can be chosen, and what is known of the one that is.
import { fetchModels } from "./front.js";
import { formatNumber, make } from "./parts.js";

const REFRESH_MILLISECONDS = 60_000;

export function describeCount(count, noun) {
  return `${formatNumber(count)} ${noun}${count === 1 ? "" : "s"}`;
}

export class Models {
  // `changed` is called whenever another model is chosen, or more is known of it.
  constructor(settings, changed) {
    this.select = settings.model;
    this.facts = document.getElementById("model-facts");
    this.chosen = settings.chosenModel;
    this.changed = changed;
    this.byName = new Map();
    this.isKnown = false; // the list was read at least once
    this.select.addEventListener("change", () => this.#choose(this.select.value));
    setInterval(() => document.hidden || this.load(), REFRESH_MILLISECONDS);
    document.addEventListener("visibilitychange", () => document.hidden || this.load());
  }

  // What the front says of the chosen model; undefined when nobody serves it.
  get card() {
    return this.byName.get(this.select.value);
  }

  get seesImages() {
    return Boolean(this.card?.architecture.input_modalities.includes("image"));
  }

  offers(parameter) {
    return Boolean(this.card?.supported_parameters.includes(parameter));
  }

  async load() {
    try {
      const models = await fetchModels();
      this.byName = new Map(models.map((model) => [model.id, model]));
      this.isKnown = true;
      this.#show();
    } catch (error) {
      this.facts.textContent = error.message;
    }
  }

  #choose(name) {
    this.chosen = name;
    this.#describe();
    this.changed();
  }

  #show() {
    const names = [...this.byName.keys()];
    const isAway = this.chosen && !this.byName.has(this.chosen);
    const options = names.map((name) => new Option(name, name));
    if (isAway) options.unshift(new Option(`${this.chosen} (nobody serves it now)`, this.chosen));
    const isSame = options.map((option) => option.text).join("\n") === [...this.select.options].map((option) => option.text).join("\n");
    if (!isSame) this.select.replaceChildren(...options); // an open list stays open
    if (this.chosen) this.select.value = this.chosen;
    this.#choose(this.select.value);
  }

  #describe() {
    const { card } = this;
    if (card) {
      const limits = [
        `${formatNumber(card.context_length)} tokens of context`,
        `replies up to ${formatNumber(card.top_provider.max_completion_tokens)}`,
        ...(this.seesImages ? ["sees images"] : []),
      ];
      const workers = ` ${describeCount(card.x_horde.workers, "worker")}`;
      const more = make("span", { text: ` · ${limits.join(" · ")}`, className: "limits" });
      this.facts.replaceChildren(make("strong", { text: card.id, className: "name" }), workers, more);
    } else {
      this.facts.textContent = this.byName.size ? "Nobody serves this model now: choose another one." : "No worker serves chat now.";
    }
  }
}
