// The conversation: what was said, what is being answered, and what goes wrong.
import { keyIsWanted } from "./key.js";
import { SettingsError } from "./settings.js";
import { events, ServerError } from "./stream.js";
import { AnswerTurn, button, element, userTurn } from "./turns.js";

// Milliseconds from the first token to the last below which a rate is chance: tokens come several at once.
const LEAST_MEASURED = 200;

const at = (id) => document.getElementById(id);

export class Chat {
  constructor(settings) {
    this.settings = settings;
    this.messages = []; // { message, root }
    this.stopping = null; // an AbortController while an answer comes
    at("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    at("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    at("prompt").addEventListener("input", grow);
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
    at("stop-answer").addEventListener("click", () => this.stop());
    at("new").addEventListener("click", () => this.clear());
    at("prompt").focus();
  }

  send() {
    const text = at("prompt").value;
    if (this.stopping || !text.trim()) return;
    const body = this.body();
    if (!body) return;
    const last = this.messages.at(-1);
    if (last?.message.role === "user") {
      last.root.classList.add("unanswered"); // it is told no more: most templates want an answer between two
      this.messages.pop();
    }
    this.clearFaults();
    this.add({ role: "user", content: text }, userTurn(text));
    at("prompt").value = "";
    grow();
    this.answer(body);
  }

  // The settings as they are now; null, with the fault shown, where they cannot be read.
  body() {
    try {
      return this.settings.body();
    } catch (error) {
      if (!(error instanceof SettingsError)) throw error;
      at("said").textContent = error.message;
      document.querySelector('[data-show="settings"]').click();
      error.field.focus();
      return null;
    }
  }

  async answer(body) {
    const turn = new AnswerTurn();
    this.show(turn.root);
    this.stopping = new AbortController();
    this.busy(true);
    const system = this.settings.system;
    const told = this.messages.map(({ message }) => message);
    const request = {
      ...body,
      messages: system ? [{ role: "system", content: system }, ...told] : told,
      stream: true,
      stream_options: { include_usage: true },
    };
    const begun = performance.now();
    let first = 0, last = 0, reason = "", usage = null, failed = null;
    try {
      for await (const event of events("v1/chat/completions", request, this.stopping.signal)) {
        usage = event.usage ?? usage;
        const choice = event.choices?.[0];
        if (!choice) continue;
        reason = choice.finish_reason ?? reason;
        const { role, ...delta } = choice.delta ?? {};
        if (Object.values(delta).some((part) => part?.length)) {
          last = performance.now();
          first ||= last;
          const below = atEnd();
          turn.take(delta);
          if (below) toEnd();
        }
      }
    } catch (error) {
      if (error.name === "AbortError") reason = "stopped";
      else failed = error;
    }
    this.stopping = null;
    this.busy(false);
    turn.end(measured({ begun, first, last, usage, reason }));
    if (failed) this.fail(failed, turn);
    if (turn.empty) {
      turn.root.remove();
      if (!failed) at("said").textContent = reason === "stopped" ? "Stopped." : "The answer is empty.";
    } else {
      this.keep(turn, reason, failed);
    }
    toEnd();
  }

  keep(turn, reason, failed) {
    this.messages.push({ message: turn.message(), root: turn.root });
    const again = () => this.again(turn);
    turn.under.append(button("Copy", () => copy(turn.content || turn.calls.map((c) => c.function.arguments).join("\n"))));
    for (const other of document.querySelectorAll(".again")) other.remove();
    const redo = button("Answer again", again);
    redo.classList.add("again");
    turn.under.append(redo);
    if (failed) return;
    at("said").textContent = reason === "stopped" ? "Stopped." : "The answer is complete.";
    if (turn.calls.length && reason === "tool_calls") this.askForResults(turn);
  }

  // Drops the last answer, and asks for another.
  again(turn) {
    if (this.stopping || this.messages.at(-1)?.root !== turn.root) return;
    const body = this.body();
    if (!body) return;
    this.clearFaults();
    this.messages.pop();
    turn.root.remove();
    this.answer(body);
  }

  // The model has called functions: their results are typed in, and sent back.
  askForResults(turn) {
    const form = element("form", "results");
    const fields = turn.calls.map((call, index) => {
      const label = element("label", "", `Result of ${call.function.name}`);
      const field = element("textarea", "code");
      field.rows = 2;
      field.id = `result-${this.messages.length}-${index}`;
      label.htmlFor = field.id;
      call.box.append(label, field);
      return field;
    });
    const submit = element("button", "main", fields.length > 1 ? "Send the results" : "Send the result");
    submit.type = "submit";
    form.append(submit);
    turn.under.before(form);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const body = this.stopping || this.messages.at(-1)?.root !== turn.root ? null : this.body();
      if (!body) return;
      if (typeof body.tool_choice === "object" || body.tool_choice === "required") body.tool_choice = "auto";
      for (const [index, field] of fields.entries()) {
        const { id, function: called } = turn.calls[index];
        const message = { role: "tool", tool_call_id: id, content: field.value };
        this.add(message, userTurn(field.value, `Result of ${called.name}`));
        field.readOnly = true;
      }
      form.remove();
      this.answer(body);
    });
    fields[0].focus();
  }

  fail(error, turn) {
    const wanted = error instanceof ServerError && error.status === 401;
    if (wanted) keyIsWanted();
    const unreached = error instanceof TypeError ? "the server cannot be reached" : error.message;
    const box = element("div", "error");
    box.setAttribute("role", "alert");
    box.append(element("p", "", wanted ? `${unreached} (Settings, API key)` : unreached));
    const item = element("li", "turn fault-turn");
    if (turn.empty) {
      box.append(button("Try again", () => {
        const body = this.stopping ? null : this.body();
        if (!body) return;
        this.clearFaults();
        this.answer(body);
      }));
    }
    item.append(box);
    this.show(item);
    at("said").textContent = "";
  }

  stop() {
    this.stopping?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    at("messages").replaceChildren();
    at("empty").hidden = false;
    at("said").textContent = "";
    at("prompt").focus();
  }

  add(message, root) {
    this.messages.push({ message, root });
    this.show(root);
  }

  show(root) {
    at("empty").hidden = true;
    at("messages").append(root);
    toEnd();
  }

  clearFaults() {
    for (const item of document.querySelectorAll(".fault-turn")) item.remove();
  }

  busy(on) {
    // The two buttons take turns in one place: the keyboard's focus goes on to the one that is there.
    const [gone, here] = on ? [at("send"), at("stop-answer")] : [at("stop-answer"), at("send")];
    const focused = document.activeElement === gone;
    gone.hidden = true;
    here.hidden = false;
    if (focused) here.focus();
    at("new").disabled = on;
    if (on) at("said").textContent = "The model is answering.";
  }
}

function measured({ begun, first, last, usage, reason }) {
  const parts = [];
  const tokens = usage?.completion_tokens;
  if (tokens) parts.push(`${tokens} tokens in ${((last - begun) / 1000).toFixed(2)} s`);
  if (tokens > 1 && last - first > LEAST_MEASURED) parts.push(`${(((tokens - 1) * 1000) / (last - first)).toFixed(1)} tokens/s`);
  if (first) parts.push(`first after ${((first - begun) / 1000).toFixed(2)} s`);
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (cached) parts.push(`${cached} of ${usage.prompt_tokens} prompt tokens cached`);
  if (reason && reason !== "stop") parts.push(reason === "length" ? "cut off: max tokens" : reason.replace("_", " "));
  return parts.join(" · ");
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    at("said").textContent = "Copied.";
  } catch {
    at("said").textContent = "The browser does not let this page copy: select the text instead.";
  }
}

function grow() {
  const field = at("prompt");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

const atEnd = () => at("scroll").scrollHeight - at("scroll").scrollTop - at("scroll").clientHeight < 40;
const toEnd = () => at("scroll").scrollTo(0, at("scroll").scrollHeight);
