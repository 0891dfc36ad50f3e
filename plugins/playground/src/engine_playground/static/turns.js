// The turns of a conversation as elements. Texts of the model and of the user are set as text, never as HTML.
export function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

export function button(text, onClick) {
  const made = element("button", "quiet", text);
  made.type = "button";
  made.addEventListener("click", onClick);
  return made;
}

export function userTurn(text, name = "You") {
  const turn = element("li", "turn user");
  turn.append(element("h3", "", name), element("div", "text", text));
  return turn;
}

// The model's turn, which grows: thoughts, text, calls.
export class AnswerTurn {
  constructor() {
    this.root = element("li", "turn assistant answering");
    this.root.setAttribute("aria-busy", "true");
    this.content = "";
    this.thoughts = "";
    this.calls = [];
    this.text = element("div", "text");
    this.textNode = document.createTextNode("");
    this.text.append(this.textNode);
    this.under = element("div", "under");
    this.root.append(element("h3", "", "Model"), this.text, this.under);
  }

  get empty() {
    return !this.content && !this.thoughts && !this.calls.length;
  }

  take(delta) {
    if (delta.reasoning_content) this.#think(delta.reasoning_content);
    if (delta.content) {
      this.content += delta.content;
      this.textNode.appendData(delta.content);
    }
    for (const part of delta.tool_calls ?? []) this.#call(part);
  }

  end(measured) {
    this.root.classList.remove("answering");
    this.root.removeAttribute("aria-busy");
    this.text.hidden = !this.content;
    for (const call of this.calls) call.shown.textContent = pretty(call.function.arguments);
    this.under.append(element("span", "measured", measured));
  }

  // As the server takes it back, with the conversation. A call that was cut off is left out: nobody could read it.
  message() {
    const message = { role: "assistant", content: this.content };
    const calls = this.calls.filter((call) => parsed(call.function.arguments) !== undefined);
    if (calls.length) {
      message.content = this.content || null;
      message.tool_calls = calls.map(({ id, type, function: called }) => ({ id, type, function: called }));
    }
    return message;
  }

  #think(text) {
    if (!this.thoughts) {
      const details = element("details", "thoughts");
      this.thoughtNode = document.createTextNode("");
      const shown = element("div", "text");
      shown.append(this.thoughtNode);
      details.append(element("summary", "", "Thoughts"), shown);
      details.open = true;
      this.text.before(details);
    }
    this.thoughts += text;
    this.thoughtNode.appendData(text);
  }

  #call(part) {
    let call = this.calls[part.index];
    if (!call) {
      const shown = element("pre");
      const box = element("div", "call");
      box.append(element("h4", "", `Calls ${part.function?.name ?? ""}`), shown);
      this.under.before(box);
      call = { id: part.id, type: "function", function: { name: part.function?.name ?? "", arguments: "" }, shown, box };
      this.calls[part.index] = call;
    }
    call.function.arguments += part.function?.arguments ?? "";
    call.shown.textContent = call.function.arguments;
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

function pretty(text) {
  const value = parsed(text);
  return value === undefined ? text : JSON.stringify(value, null, 2);
}
