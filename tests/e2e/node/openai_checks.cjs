// What OpenAI's Node SDK makes of a live cell; prints one JSON object for the test that runs it.
const { default: OpenAI } = require("openai");

const [baseURL, apiKey, limitedKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 20_000 });
const messages = [{ role: "user", content: "river" }];
const bounded = { model: "assistant", max_completion_tokens: 12, temperature: 0 };

async function refusal(ask) {
  try {
    await ask();
  } catch (error) {
    return { kind: error.constructor.name, status: error.status, code: error.code, param: error.param ?? null, id: !!error.requestID };
  }
  return { kind: "none" };
}

async function chatStream() {
  const stream = await client.chat.completions.create({ ...bounded, messages, stream: true, stream_options: { include_usage: true } });
  let text = "";
  let usage = null;
  const reasons = [];
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    if (chunk.choices[0]?.finish_reason) reasons.push(chunk.choices[0].finish_reason);
    usage = chunk.usage ?? usage;
  }
  return { text, reasons, usage };
}

async function leftStream() {
  const stream = await client.chat.completions.create(
    { model: "assistant", messages, stream: true },
    { headers: { "Idempotency-Key": "node-left" } },
  );
  for await (const _ of stream) break;
}

async function responseStream() {
  const stream = await client.responses.create({ model: "assistant", input: "river", temperature: 0, max_output_tokens: 12, stream: true });
  const kinds = [];
  const numbers = [];
  let text = "";
  for await (const event of stream) {
    kinds.push(event.type);
    numbers.push(event.sequence_number);
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  return { kinds, numbers, text };
}

async function main() {
  const chat = await client.chat.completions.create({ ...bounded, messages });
  const completion = await client.completions.create({ model: "assistant", prompt: "river", max_tokens: 12, temperature: 0 });
  const response = await client.responses.create({ model: "assistant", input: "river", temperature: 0, max_output_tokens: 12 });
  const found = {
    models: (await client.models.list()).data.map((model) => model.id),
    chat: { text: chat.choices[0].message.content, reason: chat.choices[0].finish_reason, usage: chat.usage },
    chatStream: await chatStream(),
    completion: { text: completion.choices[0].text, reason: completion.choices[0].finish_reason },
    response: { text: response.output_text, status: response.status, usage: response.usage },
    responseStream: await responseStream(),
    wrongKey: await refusal(() => new OpenAI({ baseURL, apiKey: "sk-wrong", maxRetries: 0 }).models.list()),
    badField: await refusal(() => client.chat.completions.create({ model: "assistant", messages, temperature: 9 })),
    limited: await refusal(() => new OpenAI({ baseURL, apiKey: limitedKey, maxRetries: 2 }).chat.completions.create({ ...bounded, messages })),
  };
  await leftStream();
  console.log(JSON.stringify(found));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
