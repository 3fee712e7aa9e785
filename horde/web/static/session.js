// SPDX-License-Identifier: AGPL-3.0-or-later
// A page that needs a key: the form that asks for it, the tab that keeps it, and what is asked
// with it. The key leaves the tab as a header only.
import { ask, isKey, Refusal } from "./parts.js";

const STORED_KEY = "horde-key";
const find = (id) => document.getElementById(id);
let key = sessionStorage.getItem(STORED_KEY) ?? "";

export function getKey() {
  return key;
}

export function keepKey(newKey) {
  key = newKey;
  sessionStorage.setItem(STORED_KEY, key);
}

export function call(path, options) {
  return ask(path, key, options);
}

export function say(text, isProblem = false) {
  const said = find("said");
  said.textContent = text;
  said.className = isProblem ? "problem" : "done";
  said.hidden = !text;
}

function explain(error) {
  if (!(error instanceof Refusal)) console.error(error);
  return error instanceof Refusal ? error.message : "This page failed. Reload it.";
}

// Do something with the key and say how it went; whether it went well.
export async function attempt(act, done, after) {
  let isDone = true;
  try {
    await act();
    say(done);
  } catch (error) {
    say(explain(error), true);
    isDone = false;
  }
  await after?.();
  return isDone;
}

// Show the page once `load` succeeds with a key, and load again every so many seconds while the
// page is seen.
export function startSession({ load, seconds }) {
  let timer = null;
  let isLoading = false;

  async function refresh() {
    if (document.hidden || isLoading) return;
    isLoading = true;
    try {
      await load();
      find("stale").hidden = true;
    } catch (error) {
      find("stale").textContent = `Not up to date: ${explain(error)}`;
      find("stale").hidden = false;
    } finally {
      isLoading = false;
    }
  }

  function show(isOpen) {
    find("login").hidden = isOpen;
    find("signed-in").hidden = !isOpen;
    clearInterval(timer);
    if (isOpen) timer = setInterval(refresh, seconds * 1000);
  }

  function refuse(text) {
    const problem = find("login-problem");
    problem.textContent = text;
    problem.hidden = !text;
  }

  async function open() {
    try {
      show(true); // what is drawn measures the place it has
      await load();
      keepKey(key);
    } catch (error) {
      sessionStorage.removeItem(STORED_KEY);
      show(false);
      refuse(explain(error));
      find("key").focus();
    }
  }

  find("login").addEventListener("submit", (event) => {
    event.preventDefault();
    key = find("key").value.trim();
    find("key").value = "";
    refuse(isKey(key) ? "" : "The key holds characters that no key has.");
    if (isKey(key)) open();
  });
  find("sign-out").addEventListener("click", () => {
    sessionStorage.removeItem(STORED_KEY);
    location.reload();
  });
  document.addEventListener("visibilitychange", () => find("signed-in").hidden || refresh());
  if (isKey(key)) open();
  else show(false);
  return refresh;
}
