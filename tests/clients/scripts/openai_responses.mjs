// SPDX-License-Identifier: AGPL-3.0-or-later
// OpenAI's JavaScript library against the front, by its newer API.

import OpenAI from "openai";
import { zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { KEY, MODEL, URL, WRONG_KEY, ask, run } from "./_scenarios.mjs";

const client = new OpenAI({ baseURL: URL, apiKey: KEY });
const Person = z.object({ name: z.string(), age: z.number().int() });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };
const tools = [{ type: "function", name: "get_weather", description: "The weather of a city.", parameters, strict: true }];

async function raise(options, changes) {
  try {
    await new OpenAI({ baseURL: URL, apiKey: KEY, ...options }).responses.create({ model: MODEL, input: "The sky?", ...changes });
  } catch (error) {
    return [error.constructor.name, error.status, error.code, error.param];
  }
  return "nothing was raised";
}

await run({
  async create() {
    const reply = await client.responses.create({ model: MODEL, input: "The sky?", max_output_tokens: 64, temperature: 0 });
    return {
      content: reply.output_text,
      status: reply.status,
      tokens: reply.usage.total_tokens,
      worker: reply.x_horde.worker_name,
      has_request_id: Boolean(reply._request_id),
    };
  },

  async stream() {
    const pieces = [], kinds = [];
    for await (const event of await client.responses.create({ model: MODEL, input: "The sky?", stream: true })) {
      if (event.type === "response.output_text.delta") pieces.push(event.delta);
      else kinds.push(event.type);
    }
    return { content: pieces.join(""), kinds };
  },

  async stream_helper() {
    const stream = client.responses.stream({ model: MODEL, input: "The sky?" });
    return { content: (await stream.finalResponse()).output_text };
  },

  async tools() {
    const input = ask("What is the weather in Paris?");
    const first = await client.responses.create({ model: MODEL, input, tools });
    const [call] = first.output;
    input.push(...first.output, { type: "function_call_output", call_id: call.call_id, output: "21" });
    const second = await client.responses.create({ model: MODEL, input, tools });
    return { name: call.name, arguments: JSON.parse(call.arguments), content: second.output_text };
  },

  async structured() {
    const reply = await client.responses.parse({ model: MODEL, input: "Who?", text: { format: zodTextFormat(Person, "person") } });
    return reply.output_parsed;
  },

  async errors() {
    return {
      wrong_key: await raise({ apiKey: WRONG_KEY }, {}),
      unknown_model: await raise({}, { model: "tests/unknown-model" }),
      unsupported: await raise({}, { top_logprobs: 2 }),
      failed: await raise({}, { input: "fail" }),
    };
  },

  async cancel() {
    const stream = await client.responses.create({ model: MODEL, input: "slowly", stream: true });
    for await (const event of stream) {
      if (event.type !== "response.output_text.delta") continue;
      stream.controller.abort();
      return { content: event.delta };
    }
  },
});
