// The server's side: a streamed chat completion, and its errors in OpenAI's shape.
import { authorization } from "./key.js";

export class ServerError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const url = (path) => new URL(path, document.baseURI);

// Raises ServerError, and what fetch raises.
export async function get(path) {
  const answer = await fetch(url(path), { headers: authorization() });
  if (!answer.ok) throw await errorOf(answer);
  return answer.json();
}

// The events of a streamed answer, as objects, until the server says that it is done.
export async function* events(path, body, signal) {
  const answer = await fetch(url(path), {
    method: "POST",
    headers: { "Content-Type": "application/json", ...authorization() },
    body: JSON.stringify(body),
    signal,
  });
  if (!answer.ok) throw await errorOf(answer);
  let rest = "";
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ServerError("the connection ended in the middle of the answer", 0, "connection_lost");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ServerError(event.error.message, 0, event.error.code);
      yield event;
    }
  }
}

async function errorOf(answer) {
  let told = {};
  try {
    told = (await answer.json()).error ?? {};
  } catch {
    // Something between us and the server has answered.
  }
  const message = told.message ?? `the server answered ${answer.status} ${answer.statusText}`.trim();
  return new ServerError(message, answer.status, told.code ?? "");
}
