// SPDX-License-Identifier: AGPL-3.0-or-later
// Anthropic's JavaScript library against the front.

import Anthropic from "@anthropic-ai/sdk";
import { KEY, MODEL, URL, WRONG_KEY, ask, run } from "./_scenarios.mjs";

const baseURL = URL.replace(/\/v1$/, "");
const client = new Anthropic({ baseURL, apiKey: KEY });
const input_schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };
const tools = [{ name: "get_weather", description: "The weather of a city.", input_schema }];
const body = (text, changes = {}) => ({ model: MODEL, max_tokens: 64, messages: ask(text), ...changes });

await run({
  async chat() {
    const reply = await client.messages.create(body("The sky?", { temperature: 0, system: "Be brief." }));
    return {
      content: reply.content[0].text,
      stop: reply.stop_reason,
      tokens: reply.usage.input_tokens + reply.usage.output_tokens,
      worker: reply.x_horde.worker_name,
      has_request_id: Boolean(reply._request_id),
    };
  },

  async bearer() {
    const other = new Anthropic({ baseURL, authToken: KEY, apiKey: null });
    return { content: (await other.messages.create(body("The sky?"))).content[0].text };
  },

  async stream() {
    const pieces = [];
    const kinds = new Set();
    for await (const event of await client.messages.create(body("The sky?", { stream: true }))) {
      kinds.add(event.type);
      if (event.type === "content_block_delta") pieces.push(event.delta.text);
    }
    return { content: pieces.join(""), pieces: pieces.length, kinds: [...kinds].sort() };
  },

  async stream_helper() {
    const message = await client.messages.stream(body("The sky?")).finalMessage();
    return { content: message.content[0].text, tokens: message.usage.input_tokens + message.usage.output_tokens };
  },

  async tools() {
    const messages = ask("What is the weather in Paris?");
    const first = await client.messages.create(body("", { messages, tools }));
    const call = first.content.find((block) => block.type === "tool_use");
    messages.push({ role: "assistant", content: first.content }, { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "21" }] });
    const second = await client.messages.create(body("", { messages, tools }));
    return { stop: first.stop_reason, name: call.name, arguments: call.input, content: second.content[0].text };
  },

  async stream_of_a_call() {
    const call = (await client.messages.stream(body("Weather?", { tools })).finalMessage()).content[0];
    return { name: call.name, arguments: call.input };
  },

  async tool_runner() {
    const asked = [];
    const tool = { type: "custom", ...tools[0], parse: (input) => input, run: ({ city }) => (asked.push(city), "21") };
    const message = await client.beta.messages.toolRunner(body("What is the weather in Paris?", { tools: [tool] }));
    return { content: message.content[0].text, asked };
  },

  async reasoning() {
    const [thinking, text] = (await client.messages.create(body("reason", { thinking: { type: "enabled", budget_tokens: 1024 } }))).content;
    return { content: text.text, reasoning: thinking.thinking, signed: Boolean(thinking.signature) };
  },

  async count() {
    return { tokens: (await client.messages.countTokens({ model: MODEL, messages: ask("The sky?"), tools })).input_tokens };
  },

  async models() {
    const listed = [];
    for await (const model of client.models.list()) listed.push(model.id);
    return { is_listed: listed.includes(MODEL), retrieved: (await client.models.retrieve(MODEL)).id };
  },

  async errors() {
    const see = async (options, changes) => {
      let attempts = 0;
      const counting = (...words) => (attempts++, fetch(...words));
      try {
        await new Anthropic({ baseURL, apiKey: KEY, fetch: counting, ...options }).messages.create(body("The sky?", changes));
      } catch (error) {
        return [error.constructor.name, error.status, error.error.error.type, Boolean(error.requestID), attempts];
      }
      return "nothing was raised";
    };
    return {
      wrong_key: await see({ apiKey: WRONG_KEY }, {}),
      unknown_model: await see({}, { model: "tests/unknown-model" }),
      unsupported: await see({}, { top_k: 40 }),
      failed: await see({}, { messages: ask("fail") }),
    };
  },

  async cancel() {
    const { data, response } = await client.messages.create(body("slowly", { stream: true })).withResponse();
    let content;
    for await (const event of data) {
      content = event.delta?.text;
      if (content) break; // the library ends the connection
    }
    return { request_id: response.headers.get("x-horde-request-id"), content };
  },
});
