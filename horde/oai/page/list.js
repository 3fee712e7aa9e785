// SPDX-License-Identifier: AGPL-3.0-or-later
// The list of conversations: found, opened, renamed, deleted, written to a file and read from one.
import { nameConversation } from "./conversations.js";
import { make, makeButton } from "./parts.js";
import { describeCount } from "./models.js";

const RENAME = 1; // of the buttons of a conversation
const find = (id) => document.getElementById(id);

export class ConversationList {
  // `acts`: {open(id), removed(id), getCurrentId()}
  constructor(store, acts) {
    Object.assign(this, { store, acts });
    find("search").addEventListener("input", () => this.show());
    find("export").addEventListener("click", () => this.#export());
    find("import").addEventListener("click", () => find("import-file").click());
    find("import-file").addEventListener("change", (event) => this.#import(event.target));
    find("clear").addEventListener("click", () => this.#clear());
  }

  show() {
    const focused = document.activeElement.closest("#list li");
    const place = [...find("list").children].indexOf(focused);
    const button = focused && [...focused.children].indexOf(document.activeElement);
    const found = this.store.search(find("search").value);
    find("list").replaceChildren(...found.map((conversation) => this.#makeItem(conversation)));
    if (focused) this.#focus(focused.dataset.id, Math.max(0, button), place);
  }

  // The same conversation, or what stands where it stood: nobody loses their place in the list.
  #focus(id, button, place) {
    const items = [...find("list").children];
    const item = items.find((each) => each.dataset.id === id) ?? items[place] ?? items.at(-1);
    (item?.children[button] ?? find("search")).focus();
  }

  tell(text) {
    find("list-facts").textContent = text;
  }

  #makeItem(conversation) {
    const name = nameConversation(conversation);
    const open = makeButton(name, () => this.acts.open(conversation.id), "open");
    open.dir = "auto";
    if (conversation.id === this.acts.getCurrentId()) open.setAttribute("aria-current", "true");
    const rename = makeButton("✎", () => this.#rename(item, conversation.id, name), "quiet");
    const remove = makeButton("✕", () => this.#remove(conversation.id, name), "quiet");
    rename.setAttribute("aria-label", `Rename ${name}`);
    remove.setAttribute("aria-label", `Delete ${name}`);
    const item = make("li", { "data-id": conversation.id }, open, rename, remove);
    return item;
  }

  #rename(item, id, name) {
    const field = make("input", { type: "text", maxlength: 80, "aria-label": "New name", dir: "auto" });
    field.value = name;
    let isOver = false;
    const end = (isKept) => {
      if (isOver) return;
      isOver = true;
      const hadFocus = document.activeElement === field;
      const conversation = this.store.get(id);
      if (isKept && conversation) this.store.put(Object.assign(conversation, { title: field.value.trim() }));
      this.show();
      if (hadFocus) this.#focus(id, RENAME, 0);
    };
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.preventDefault(); // it would press the button that has the focus then
      end(event.key === "Enter");
    });
    field.addEventListener("blur", () => end(true));
    item.replaceChildren(field);
    field.select();
  }

  #remove(id, name) {
    if (!confirm(`Delete "${name}"?`)) return;
    this.store.remove(id);
    this.acts.removed(id);
    this.show();
  }

  #clear() {
    if (!confirm("Delete all conversations of this browser?")) return;
    const ids = this.store.list().map((conversation) => conversation.id);
    this.store.clear();
    for (const id of ids) this.acts.removed(id);
    this.show();
    this.tell("All conversations are deleted.");
  }

  #export() {
    const address = URL.createObjectURL(new Blob([this.store.exportText()], { type: "application/json" }));
    make("a", { href: address, download: "horde-conversations.json" }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10_000);
    this.tell(`${describeCount(this.store.list().length, "conversation")} exported.`);
  }

  async #import(field) {
    const [file] = field.files;
    if (!file) return;
    try {
      this.tell(`${describeCount(this.store.importText(await file.text()), "conversation")} imported.`);
    } catch {
      this.tell("This file holds no conversations that this page exported.");
    }
    field.value = "";
    this.show();
  }
}
