// Vercel's AI SDK against a running server: node ai_sdk.mjs URL CALLS SUNNY PERSON. Prints what it saw as JSON.
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, calls, sunny, person] = process.argv.slice(2);
const provider = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const schema = z.object({ name: z.string(), age: z.number().int() });
const seen = {};

// Called by name alone, the provider speaks Responses.
for (const [dialect, model] of Object.entries({ responses: provider("default"), chat: provider.chat("default") })) {
  const cities = [];
  const weather = tool({
    description: "The weather in a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => (cities.push(city), `sunny ${sunny}`),
  });
  const request = { model, tools: { weather }, prompt: `Weather? ${calls}`, stopWhen: stepCountIs(3), maxRetries: 0 };
  const whole = await generateText(request);
  const streamed = streamText({ ...request, onError: ({ error }) => { throw error; } });
  let text = "";
  for await (const piece of streamed.textStream) text += piece;
  const { object } = await generateObject({ model, schema, prompt: `Who? ${person}`, maxRetries: 0 });
  seen[dialect] = { whole: whole.text, streamed: text, cities: cities.sort(), object, steps: (await streamed.steps).length };
}
console.log(JSON.stringify(seen));
