// SPDX-License-Identifier: AGPL-3.0-or-later
// Conversations, kept in this browser alone: each under a key of its own, so that two tabs do not overwrite each other and a
// broken one harms no other. What is read back, or comes from a file, is checked piece by piece.
//
// A conversation: {id, title, updated (milliseconds), exchanges: [{asked: {text, images}, replies: [reply]}]}
// A reply: {text, reasoning, model, facts, end, toolCalls: [{id, name, arguments, result}]}, `end` being one of ENDS.

const PREFIX = "horde-chat:conversation:";
const MOST = 300; // conversations
const MOST_CHARACTERS = 4_000_000; // together; browsers keep five million
const LONGEST_TEXT = 400_000;
const LONGEST_IMAGE = 3_000_000;
const MOST_PARTS = 1000; // exchanges of a conversation, replies of an exchange, calls of a reply
const TITLE_LENGTH = 80;
const FORMAT = "horde-chat";
export const ENDS = ["done", "stopped", "failed", "open"];

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const readText = (value, most = LONGEST_TEXT) => (typeof value === "string" ? value.slice(0, most) : "");
const readList = (value, read) => (Array.isArray(value) ? value.slice(0, MOST_PARTS).map(read).filter(Boolean) : []);

export function isImage(value) {
  return typeof value === "string" && value.length <= LONGEST_IMAGE && /^data:image\/(?:png|jpeg|webp|gif);base64,[A-Za-z0-9+/=]+$/.test(value);
}

function readCall(value) {
  if (!isObject(value)) return null;
  const call = { id: readText(value.id, 200), name: readText(value.name, 200), arguments: readText(value.arguments) };
  return typeof value.result === "string" ? { ...call, result: readText(value.result) } : call;
}

function readReply(value) {
  if (!isObject(value)) return null;
  return {
    text: readText(value.text),
    reasoning: readText(value.reasoning),
    model: readText(value.model, 300),
    facts: readText(value.facts, 1000),
    end: ENDS.includes(value.end) ? value.end : "done",
    toolCalls: readList(value.toolCalls, readCall),
  };
}

function readExchange(value) {
  if (!isObject(value) || !isObject(value.asked)) return null;
  const images = readList(value.asked.images, (image) => (isImage(image) ? image : null));
  return { asked: { text: readText(value.asked.text), images }, replies: readList(value.replies, readReply) };
}

// The conversation in a value from anywhere; null when there is none.
export function readConversation(value) {
  if (!isObject(value) || typeof value.id !== "string" || !/^[\w-]{1,64}$/.test(value.id) || !Array.isArray(value.exchanges)) return null;
  const updated = Number.isFinite(value.updated) ? Math.min(Math.max(value.updated, 0), Date.now()) : 0;
  return { id: value.id, title: readText(value.title, TITLE_LENGTH), updated, exchanges: readList(value.exchanges, readExchange) };
}

export function beginConversation() {
  return { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.floor(Math.random() * 1e9)}`, title: "", updated: Date.now(), exchanges: [] };
}

// What a conversation without a title of its own is called.
export function nameConversation({ title, exchanges }) {
  const first = exchanges[0]?.asked;
  return title || first?.text.trim().split("\n")[0].slice(0, TITLE_LENGTH) || (first ? "An image" : "New chat");
}

export class ConversationStore {
  // `storage` may be missing or refuse: then conversations live as long as the page.
  constructor(storage = findStorage()) {
    this.storage = storage;
    this.loose = new Map(); // what cannot be stored
  }

  #listKeys() {
    return Object.keys(this.storage ?? {}).filter((key) => key.startsWith(PREFIX));
  }

  #read(key) {
    try {
      return readConversation(JSON.parse(this.storage.getItem(key)));
    } catch {
      return null;
    }
  }

  // All of them, the newest first.
  list() {
    const stored = this.#listKeys().map((key) => this.#read(key)).filter(Boolean);
    const found = new Map([...stored.map((each) => [each.id, each]), ...this.loose]);
    return [...found.values()].sort((one, other) => other.updated - one.updated);
  }

  get(id) {
    return this.loose.get(id) ?? this.#read(PREFIX + id);
  }

  // Whether it is kept. What is too much goes: broken entries first, then what was longest untouched.
  put(conversation) {
    const text = JSON.stringify(conversation);
    this.loose.set(conversation.id, conversation);
    if (!this.storage || text.length > MOST_CHARACTERS) return false;
    const others = this.#listKeys().filter((key) => key !== PREFIX + conversation.id);
    const sizes = new Map(others.map((key) => [key, this.storage.getItem(key)?.length ?? 0]));
    let characters = text.length + [...sizes.values()].reduce((sum, size) => sum + size, 0);
    const age = new Map(characters > MOST_CHARACTERS || others.length >= MOST ? others.map((key) => [key, this.#read(key)?.updated ?? -1]) : []);
    const oldest = [...age.keys()].sort((one, other) => age.get(one) - age.get(other));
    for (let kept = others.length + 1; kept > MOST || characters > MOST_CHARACTERS; kept -= 1) {
      const key = oldest.shift();
      characters -= sizes.get(key);
      this.storage.removeItem(key);
    }
    if (!this.#write(PREFIX + conversation.id, text)) return false;
    this.loose.delete(conversation.id);
    return true;
  }

  #write(key, text) {
    for (;;) {
      try {
        this.storage.setItem(key, text);
        return true;
      } catch {
        const oldest = this.#listKeys().filter((each) => each !== key).sort((one, other) => (this.#read(one)?.updated ?? -1) - (this.#read(other)?.updated ?? -1))[0];
        if (!oldest) return false;
        this.storage.removeItem(oldest);
      }
    }
  }

  remove(id) {
    this.loose.delete(id);
    this.storage?.removeItem(PREFIX + id);
  }

  clear() {
    this.loose.clear();
    for (const key of this.#listKeys()) this.storage.removeItem(key);
  }

  // Those whose name or text holds all words.
  search(words) {
    const wanted = words.toLocaleLowerCase().split(/\s+/).filter(Boolean);
    return this.list().filter((conversation) => {
      const texts = conversation.exchanges.flatMap(({ asked, replies }) => [asked.text, ...replies.map((reply) => reply.text)]);
      const said = [nameConversation(conversation), ...texts].join("\n").toLocaleLowerCase();
      return wanted.every((word) => said.includes(word));
    });
  }

  exportText() {
    return JSON.stringify({ format: FORMAT, version: 1, conversations: this.list() });
  }

  // Take in what a file holds; how many it were. Raises SyntaxError when it is no such file.
  importText(text) {
    const value = JSON.parse(text);
    if (!isObject(value) || value.format !== FORMAT) throw new SyntaxError("no conversations in it");
    const found = readList(value.conversations, readConversation);
    for (const conversation of found) this.put(conversation);
    return found.length;
  }
}

// Local storage, where the browser grants it.
export function findStorage() {
  try {
    localStorage.setItem("horde-chat:probe", "1");
    localStorage.removeItem("horde-chat:probe");
    return localStorage;
  } catch {
    return null;
  }
}
