// What Anthropic's Node SDK makes of a live cell; prints one JSON object for the test that runs it.
const { default: Anthropic } = require("@anthropic-ai/sdk");

const [baseURL, apiKey, limitedKey] = process.argv.slice(2);
const client = new Anthropic({ baseURL, apiKey, maxRetries: 0, timeout: 20_000 });
const asked = { model: "assistant", max_tokens: 12, temperature: 0, messages: [{ role: "user", content: "river" }] };

async function refusal(ask) {
  try {
    await ask();
  } catch (error) {
    return { kind: error.constructor.name, status: error.status, type: error.error?.error?.type, code: error.error?.error?.code, id: !!error.requestID };
  }
  return { kind: "none" };
}

async function stream() {
  const made = client.messages.stream(asked);
  const kinds = [];
  let text = "";
  made.on("streamEvent", (event) => kinds.push(event.type));
  made.on("text", (delta) => (text += delta));
  const message = await made.finalMessage();
  return { kinds, text, whole: message.content[0].text, reason: message.stop_reason, usage: message.usage };
}

async function main() {
  const message = await client.messages.create(asked);
  const found = {
    message: { text: message.content[0].text, reason: message.stop_reason, usage: message.usage, model: message.model },
    stream: await stream(),
    count: await client.messages.countTokens({ model: "assistant", messages: asked.messages }),
    wrongKey: await refusal(() => new Anthropic({ baseURL, apiKey: "sk-wrong", maxRetries: 0 }).messages.create(asked)),
    badField: await refusal(() => client.messages.create({ ...asked, temperature: 9 })),
    limited: await refusal(() => new Anthropic({ baseURL, apiKey: limitedKey, maxRetries: 2 }).messages.create(asked)),
  };
  console.log(JSON.stringify(found));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
