// OpenAI's own Node client against a running server: node client.mjs BASE_URL. Prints what it saw as JSON.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const request = { model: "default", messages: [{ role: "user", content: "Say hello." }], max_tokens: 12, temperature: 0 };
const seen = {};

const whole = await client.chat.completions.create(request);
seen.whole = whole.choices[0].message.content;

let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...request, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
seen.streamed = streamed;

// The helper throws where a role, a finish reason or every chunk is missing.
const runner = client.chat.completions.stream({ ...request, stream_options: { include_usage: true } });
let pieces = "";
runner.on("content", (delta) => (pieces += delta));
const final = await runner.finalChatCompletion();
seen.helper = pieces;
seen.final = final.choices[0].message.content;
seen.finish_reason = final.choices[0].finish_reason;
seen.usage = final.usage?.completion_tokens;

try {
  await client.chat.completions.create({ ...request, temperature: 9 });
} catch (error) {
  seen.error = { name: error.constructor.name, status: error.status, param: error.param };
}
seen.models = (await client.models.list()).data.length;
console.log(JSON.stringify(seen));
