// SPDX-License-Identifier: AGPL-3.0-or-later
// The front's own routes: what models there are, and a completion as it is written.

export const ANONYMOUS_KEY = "0000000000";

export class Failure extends Error {
  constructor({ message, code = null, status = null, requestId = null, retryAfter = null }) {
    super(message);
    Object.assign(this, { code, status, requestId, retryAfter });
  }
}

function buildFailure(body, response) {
  const error = body?.error ?? {};
  return new Failure({
    message: error.message ?? `The server answered ${response?.status ?? "something unreadable"}.`,
    code: error.code,
    status: response && !response.ok ? response.status : null,
    requestId: error.metadata?.request_id,
    retryAfter: response?.headers.get("Retry-After"),
  });
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, { credentials: "omit", cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure({ message: "The server cannot be reached." });
  }
  if (!response.ok) throw buildFailure(await response.json().catch(() => null), response);
  return response;
}

export async function fetchModels() {
  return (await (await request("v1/models")).json()).data;
}

// {title, site, source}: what this horde is called, and where its other pages and its source are, null when nobody said.
export async function fetchFacts() {
  return (await request("page.json")).json();
}

// Each event of a stream as {data, comment}; one of the two is empty.
export async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader(); // not every browser can iterate over a stream
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const lines = event.split("\n");
      const pick = (mark) => lines.filter((line) => line.startsWith(mark)).map((line) => line.slice(mark.length).trimStart()).join("\n");
      yield { data: pick("data:"), comment: pick(":") };
    }
  }
}

// A comment that tells how a request waits: {queue_position, wait_time, kudos}, null for any other.
export function readWait(comment) {
  if (!comment.startsWith("waiting {")) return null;
  try {
    return JSON.parse(comment.slice("waiting ".length));
  } catch {
    return null;
  }
}

// The chunks of a reply, and between them {wait} while nobody writes. Raises Failure, and AbortError after `signal`.
export async function* complete(body, key, signal) {
  if (!/^[\x21-\x7e]+$/.test(key)) { // the browser would refuse the header, and not say why
    throw new Failure({ message: "The API key holds characters that no key has.", code: "invalid_api_key", status: 401 });
  }
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", Authorization: `Bearer ${key}`, "X-Horde-Wait": "comments" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  try {
    for await (const { data, comment } of readEvents(response.body)) {
      const wait = readWait(comment);
      if (wait) yield { wait };
      if (!data) continue;
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw buildFailure(chunk);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof Failure || error.name === "AbortError") throw error;
    throw new Failure({ message: "The connection broke." });
  }
  throw new Failure({ message: "The reply broke off." });
}
