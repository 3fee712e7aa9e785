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

// A success is told for a while, a problem until something else is.
const TOLD_MILLISECONDS = 20_000;
let telling = null;

export function say(text, isProblem = false) {
  clearTimeout(telling);
  if (text && !isProblem) telling = setTimeout(say, TOLD_MILLISECONDS, "");
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
  try {
    await after?.();
  } catch (error) {
    say(explain(error), true);
  }
  return isDone;
}

// Show the page once `load` succeeds with a key, and load again every so many seconds while the
// page is seen and nobody paused that. Returns what loads it now.
export function startSession({ load, seconds }) {
  const pause = find("pause");
  let timer = null;
  let loading = null;
  let isWanted = false;

  async function loadWhileWanted() {
    while (isWanted) {
      isWanted = false;
      try {
        await load();
        find("stale").hidden = true;
      } catch (error) {
        find("stale").textContent = `Not up to date: ${explain(error)}`;
        find("stale").hidden = false;
      }
    }
    loading = null;
  }

  // What is being loaded may be older than what was just changed, so it is loaded once more then.
  function refresh() {
    isWanted = true;
    loading ??= loadWhileWanted();
    return loading;
  }

  function tick() {
    if (!document.hidden && !loading && !isPaused()) refresh();
  }

  function isPaused() {
    return pause.getAttribute("aria-pressed") === "true";
  }

  function show(isOpen) {
    find("login").hidden = isOpen;
    find("signed-in").hidden = !isOpen;
    clearInterval(timer);
    if (isOpen) timer = setInterval(tick, seconds * 1000);
  }

  function refuse(text) {
    const problem = find("login-problem");
    problem.textContent = text;
    problem.hidden = !text;
  }

  // A key that is refused is forgotten; one that could not be asked with may work after a reload.
  async function open() {
    try {
      show(true); // what is drawn measures the place it has
      await load();
      keepKey(key);
      return true;
    } catch (error) {
      if ([401, 403].includes(error.status)) sessionStorage.removeItem(STORED_KEY);
      show(false);
      refuse(explain(error));
      return false;
    }
  }

  find("login").addEventListener("submit", async (event) => {
    event.preventDefault();
    const field = find("key");
    const typed = field.value.trim();
    refuse(isKey(typed) ? "" : "The key holds characters that no key has.");
    if (!isKey(typed)) return;
    key = typed;
    const isOpen = await open();
    if (isOpen) field.value = "";
    (isOpen ? document.querySelector("h1") : field).focus(); // the form is gone, or asks again
  });
  find("sign-out").addEventListener("click", () => {
    sessionStorage.removeItem(STORED_KEY);
    location.reload();
  });
  pause.addEventListener("click", () => {
    pause.setAttribute("aria-pressed", String(!isPaused()));
    if (!isPaused()) refresh();
  });
  document.addEventListener("visibilitychange", () => find("signed-in").hidden || tick());
  if (isKey(key)) open();
  else show(false);
  return refresh;
}
