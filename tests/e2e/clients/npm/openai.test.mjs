// The npm package `openai`, against the ring at PDSERVE_URL. Run by ../test_npm.py.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const model = process.env.PDSERVE_MODEL;
const client = new OpenAI({
  baseURL: `${process.env.PDSERVE_URL}/v1`,
  apiKey: process.env.PDSERVE_API_KEY,
  maxRetries: 0,
  timeout: 30_000,
});
const messages = [{ role: "user", content: "Say something: 👍🏽 über" }];
const greedy = { model, temperature: 0, max_tokens: 12 };
const Place = z.strictObject({
  city: z.enum(["Paris", "Rome", "Oslo"]),
  rating: z.literal([1, 2, 3]),
  tags: z.array(z.enum(["old", "big"])).max(2),
});
const getWeather = {
  type: "function",
  function: {
    name: "get_weather",
    strict: true,
    parameters: {
      type: "object",
      properties: { city: { enum: ["Paris", "Rome"] } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};
const called = {
  model,
  messages,
  temperature: 0,
  max_tokens: 100,
  tools: [getWeather],
  tool_choice: { type: "function", function: { name: "get_weather" } },
};

async function all(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

test("models", async () => {
  const ids = (await all(client.models.list())).map((card) => card.id);
  assert.deepEqual(ids, [model]);
  assert.equal((await client.models.retrieve(model)).id, model);
});

test("a completion and its stream agree", async () => {
  for (const prompt of ["once upon", [104, 105]]) {
    const whole = await client.completions.create({ ...greedy, prompt });
    const chunks = await all(await client.completions.create({ ...greedy, prompt, stream: true }));
    assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(""), whole.choices[0].text);
  }
  const batch = await client.completions.create({ ...greedy, prompt: ["a", "b"], n: 2 });
  assert.deepEqual(batch.choices.map((choice) => choice.index), [0, 1, 2, 3]);
});

test("a chat and its stream agree, with usage", async () => {
  const whole = await client.chat.completions.create({ ...greedy, messages });
  const stream = await client.chat.completions.create({
    ...greedy,
    messages,
    stream: true,
    stream_options: { include_usage: true },
  });
  const chunks = await all(stream);
  const deltas = chunks.flatMap((chunk) => chunk.choices).map((choice) => choice.delta.content ?? "");
  assert.equal(deltas.join(""), whole.choices[0].message.content);
  assert.deepEqual(chunks.at(-1).choices, []);
  assert.equal(chunks.at(-1).usage.completion_tokens, whole.usage.completion_tokens);
  assert.ok(chunks.slice(0, -1).every((chunk) => !chunk.usage));
});

test("the package's own accumulator builds the same answer", async () => {
  const whole = await client.chat.completions.create({ ...greedy, messages });
  const final = await client.chat.completions.stream({ ...greedy, messages }).finalChatCompletion();
  assert.equal(final.choices[0].message.content, whole.choices[0].message.content);
  assert.equal(final.choices[0].finish_reason, whole.choices[0].finish_reason);
});

test("logprobs and headers", async () => {
  const { data, response } = await client.chat.completions
    .create({ ...greedy, messages, logprobs: true, top_logprobs: 2 }, { headers: { "X-Request-Id": "mine-4" } })
    .withResponse();
  assert.equal(data.choices[0].logprobs.content.length, data.usage.completion_tokens);
  assert.equal(data.choices[0].logprobs.content[0].top_logprobs.length, 2);
  assert.equal(response.headers.get("x-request-id"), "mine-4");
  assert.equal(data.id, "chatcmpl-mine-4");
});

test("structured output is parsed, whole and streamed", async () => {
  const ask = { ...greedy, max_tokens: 200, messages, response_format: zodResponseFormat(Place, "place") };
  const whole = await client.chat.completions.parse(ask);
  Place.parse(whole.choices[0].message.parsed);
  const final = await client.chat.completions.stream(ask).finalChatCompletion();
  assert.deepEqual(final.choices[0].message.parsed, whole.choices[0].message.parsed);
});

test("a tool is called, whole and streamed", async () => {
  const [call] = (await client.chat.completions.create(called)).choices[0].message.tool_calls;
  assert.equal(call.function.name, "get_weather");
  assert.ok(["Paris", "Rome"].includes(JSON.parse(call.function.arguments).city));
  const chunks = await all(await client.chat.completions.create({ ...called, stream: true }));
  const deltas = chunks.flatMap((chunk) => chunk.choices[0]?.delta.tool_calls ?? []);
  assert.equal(deltas.map((delta) => delta.function.name ?? "").join(""), "get_weather");
  assert.equal(deltas.map((delta) => delta.function.arguments ?? "").join(""), call.function.arguments);
});

test("a response and its stream agree", async () => {
  const ask = { model, input: "Hi", temperature: 0, max_output_tokens: 12 };
  const whole = await client.responses.create(ask);
  const events = await all(await client.responses.create({ ...ask, stream: true }));
  const deltas = events.filter((event) => event.type === "response.output_text.delta");
  assert.equal(deltas.map((event) => event.delta).join(""), whole.output_text);
  assert.match(events.at(-1).type, /^response\.(completed|incomplete)$/);
});

test("errors are the package's own classes", async () => {
  await assert.rejects(client.chat.completions.create({ ...greedy, messages, temperature: -1 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    return true;
  });
  await assert.rejects(client.completions.create({ model: "gpt-9", prompt: "a" }), OpenAI.NotFoundError);
  await assert.rejects(client.withOptions({ apiKey: "wrong" }).models.list(), OpenAI.AuthenticationError);
  const away = new OpenAI({ baseURL: "http://127.0.0.1:9/v1", apiKey: "any", maxRetries: 0 });
  await assert.rejects(away.models.list(), OpenAI.APIConnectionError);
});

test("a stream that is left and a call that takes too long", async () => {
  const endless = { model, prompt: "go on", max_tokens: 900, ignore_eos: true };
  for await (const chunk of await client.completions.create({ ...endless, stream: true })) {
    assert.equal(chunk.object, "text_completion");
    break;
  }
  await assert.rejects(client.completions.create(endless, { timeout: 200 }), OpenAI.APIConnectionTimeoutError);
});
