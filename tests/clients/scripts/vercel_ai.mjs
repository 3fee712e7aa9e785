// SPDX-License-Identifier: AGPL-3.0-or-later
// Vercel's AI SDK with its OpenAI-compatible provider against the front.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, isStepCount, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { KEY, MODEL, URL, WRONG_KEY, run } from "./_scenarios.mjs";

const build = (apiKey) =>
  createOpenAICompatible({ name: "horde", baseURL: URL, apiKey, includeUsage: true, supportsStructuredOutputs: true })(MODEL);
const model = build(KEY);
const Person = z.object({ name: z.string(), age: z.number().int() });

await run({
  async chat() {
    const reply = await generateText({ model, prompt: "The sky?", maxOutputTokens: 64, temperature: 0 });
    return { content: reply.text, finish: reply.finishReason, tokens: reply.usage.totalTokens };
  },

  async stream() {
    const reply = streamText({ model, prompt: "The sky?" });
    const pieces = [];
    for await (const piece of reply.textStream) pieces.push(piece);
    return { content: pieces.join(""), pieces: pieces.length, tokens: (await reply.usage).totalTokens };
  },

  async tools() {
    const asked = [];
    const get_weather = tool({
      description: "The weather of a city.",
      inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => (asked.push(city), "21"),
    });
    const stopWhen = (stepCountIs ?? isStepCount)(3);
    const reply = await generateText({ model, prompt: "What is the weather in Paris?", tools: { get_weather }, stopWhen });
    return { content: reply.text, arguments: { city: asked[0] }, steps: reply.steps.length };
  },

  async tools_streamed() {
    const get_weather = tool({ inputSchema: z.object({ city: z.string() }), execute: async () => "21" });
    const reply = streamText({ model, prompt: "Weather?", tools: { get_weather }, stopWhen: (stepCountIs ?? isStepCount)(3) });
    await reply.consumeStream();
    return { content: await reply.text };
  },

  async structured() {
    return (await generateText({ model, prompt: "Who?", output: Output.object({ schema: Person }) })).output;
  },

  async reasoning() {
    const reply = await generateText({ model, prompt: "reason" });
    return { content: reply.text, reasoning: reply.reasoningText };
  },

  async errors() {
    try {
      await generateText({ model: build(WRONG_KEY), prompt: "The sky?" });
    } catch (error) {
      return { wrong_key: error.statusCode };
    }
    return "nothing was raised";
  },

  async cancel() {
    const controller = new AbortController();
    const reply = streamText({ model, prompt: "slowly", abortSignal: controller.signal });
    let content = "";
    for await (const piece of reply.textStream) {
      content += piece;
      controller.abort();
    }
    return { content };
  },
});
