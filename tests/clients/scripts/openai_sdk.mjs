// SPDX-License-Identifier: AGPL-3.0-or-later
// OpenAI's JavaScript library against the front.

import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { KEY, MODEL, URL, WRONG_KEY, ask, run } from "./_scenarios.mjs";

const client = new OpenAI({ baseURL: URL, apiKey: KEY });
const Person = z.object({ name: z.string(), age: z.number().int() });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };
const tools = [{ type: "function", function: { name: "get_weather", description: "The weather of a city.", parameters } }];

await run({
  async chat() {
    const reply = await client.chat.completions.create({ model: MODEL, messages: ask("The sky?"), max_tokens: 64, temperature: 0 });
    const choice = reply.choices[0];
    return {
      content: choice.message.content,
      finish: choice.finish_reason,
      tokens: reply.usage.total_tokens,
      worker: reply.x_horde.worker_name,
      has_request_id: Boolean(reply._request_id),
    };
  },

  async stream() {
    const options = { model: MODEL, messages: ask("The sky?"), stream: true, stream_options: { include_usage: true } };
    const pieces = [];
    let tokens, finish;
    for await (const chunk of await client.chat.completions.create(options)) {
      if (chunk.choices[0]?.delta.content) pieces.push(chunk.choices[0].delta.content);
      finish = chunk.choices[0]?.finish_reason ?? finish;
      tokens = chunk.usage?.total_tokens ?? tokens;
    }
    return { content: pieces.join(""), pieces: pieces.length, finish, tokens };
  },

  async stream_helper() {
    const stream = client.chat.completions.stream({ model: MODEL, messages: ask("The sky?") });
    return { content: (await stream.finalChatCompletion()).choices[0].message.content };
  },

  async tools() {
    const messages = ask("What is the weather in Paris?");
    const first = (await client.chat.completions.create({ model: MODEL, messages, tools })).choices[0];
    const call = first.message.tool_calls[0];
    messages.push(first.message, { role: "tool", tool_call_id: call.id, content: "21" });
    const second = (await client.chat.completions.create({ model: MODEL, messages, tools })).choices[0];
    return {
      finish: first.finish_reason,
      name: call.function.name,
      arguments: JSON.parse(call.function.arguments),
      content: second.message.content,
    };
  },

  async tool_runner() {
    const asked = [];
    const runner = client.chat.completions.runTools({
      model: MODEL,
      messages: ask("What is the weather in Paris?"),
      stream: true,
      tools: [{ type: "function", function: { name: "get_weather", parameters, parse: JSON.parse, function: ({ city }) => asked.push(city) && "21" } }],
    });
    return { content: await runner.finalContent(), asked };
  },

  async structured() {
    const response_format = zodResponseFormat(Person, "person");
    return (await client.chat.completions.parse({ model: MODEL, messages: ask("Who?"), response_format })).choices[0].message.parsed;
  },

  async reasoning() {
    const { message } = (await client.chat.completions.create({ model: MODEL, messages: ask("reason") })).choices[0];
    return { content: message.content, reasoning: message.reasoning_content };
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
        await new OpenAI({ baseURL: URL, apiKey: KEY, fetch: counting, ...options }).chat.completions.create({ model: MODEL, messages: ask("The sky?"), ...changes });
      } catch (error) {
        return [error.constructor.name, error.status, error.code, error.param ?? null, attempts];
      }
      return "nothing was raised";
    };
    return {
      wrong_key: await see({ apiKey: WRONG_KEY }, {}),
      unknown_model: await see({}, { model: "tests/unknown-model" }),
      unsupported: await see({}, { logprobs: true }),
      failed: await see({}, { messages: ask("fail") }),
    };
  },

  async cancel() {
    const { data, response } = await client.chat.completions.create({ model: MODEL, messages: ask("slowly"), stream: true }).withResponse();
    let content;
    for await (const chunk of data) {
      content = chunk.choices[0].delta.content;
      if (content) break; // the library ends the connection
    }
    return { request_id: response.headers.get("x-horde-request-id"), content };
  },
});
