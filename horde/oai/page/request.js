// SPDX-License-Identifier: AGPL-3.0-or-later
// The body of a completion out of a conversation and the settings. Pure.

// Replies that count: what failed, or came to nothing, is no part of what is said.
const listReplies = ({ replies }) => replies.filter(({ end, text, toolCalls }) => (end === "done" || end === "stopped") && (text || toolCalls.length));

function writeAsked({ text, images }, seesImages) {
  if (!images.length) return text;
  if (!seesImages) return `${text}\n[an image that you cannot see]`.trim();
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [{ type: "text", text }, ...parts] : parts;
}

function writeReply({ text, toolCalls }) {
  if (!toolCalls.length) return [{ role: "assistant", content: text }];
  const calls = toolCalls.map(({ id, name, arguments: words }) => ({ id, type: "function", function: { name, arguments: words } }));
  const results = toolCalls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result ?? "" }));
  return [{ role: "assistant", content: text || null, tool_calls: calls }, ...results];
}

// The last exchange is what is asked now; earlier ones without an answer are left out.
export function buildMessages(system, exchanges, seesImages) {
  const said = exchanges.filter((exchange, index) => index === exchanges.length - 1 || listReplies(exchange).length);
  return [
    ...(system ? [{ role: "system", content: system }] : []),
    ...said.flatMap((exchange) => [{ role: "user", content: writeAsked(exchange.asked, seesImages) }, ...listReplies(exchange).flatMap(writeReply)]),
  ];
}

// What the settings ask for, each only where it says something. Raises SyntaxError for JSON that is none.
export function buildOptions(settings) {
  const options = { model: settings.model };
  for (const [key, value] of [["max_tokens", settings.maxTokens], ["temperature", settings.temperature], ["top_p", settings.topP], ["seed", settings.seed]]) {
    if (value !== "") options[key] = Number(value);
  }
  if (settings.effort) options.reasoning_effort = settings.effort;
  if (settings.tools.trim()) options.tools = readJson(settings.tools, "Tools");
  if (settings.format === "json_object") options.response_format = { type: "json_object" };
  if (settings.format === "json_schema") {
    options.response_format = { type: "json_schema", json_schema: { name: "reply", strict: true, schema: readJson(settings.schema, "The schema") } };
  }
  if (settings.bestEffort) options.horde = { conformance: "best_effort" };
  return options;
}

export function readJson(text, name) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SyntaxError(`${name}: ${error.message}`);
  }
}
