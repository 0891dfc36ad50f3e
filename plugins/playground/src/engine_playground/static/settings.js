// The settings' form, as parts of a request's body. What is left empty is not sent: the server's defaults hold.
const SCHEMA = {
  type: "object",
  properties: { answer: { type: "string" }, confidence: { type: "number" } },
  required: ["answer", "confidence"],
  additionalProperties: false,
};
const TOOLS = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather in a city now",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];

const at = (id) => document.getElementById(id);

// A field that cannot be read; the form says why beside it.
export class SettingsError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

export class Settings {
  constructor() {
    at("schema").value = JSON.stringify(SCHEMA, null, 2);
    at("settings-form").addEventListener("submit", (event) => event.preventDefault());
    at("format").addEventListener("change", () => {
      at("schema-part").hidden = at("format").value !== "json_schema";
    });
    at("tools").addEventListener("input", () => this.#nameTools());
    at("tools-example").addEventListener("click", () => {
      at("tools").value = JSON.stringify(TOOLS, null, 2);
      this.#nameTools();
    });
    for (const field of at("settings-form").elements) {
      field.addEventListener("input", () => fault(field, ""));
    }
  }

  get system() {
    return at("system").value.trim();
  }

  // Raises SettingsError.
  body() {
    const body = {};
    for (const field of document.querySelectorAll("[data-body]")) {
      if (field.validity.badInput) throw refuse(field, `${labelOf(field)}: this is no number`);
      if (field.value === "") continue;
      const value = Number(field.value);
      if ("integer" in field.dataset && !Number.isInteger(value)) {
        throw refuse(field, `${labelOf(field)}: this is no whole number`);
      }
      body[field.dataset.body] = value;
    }
    const stop = at("stop").value.split("\n").filter((line) => line !== "");
    if (stop.length) body.stop = stop;
    Object.assign(body, this.#format(), this.#tools());
    return body;
  }

  #format() {
    const type = at("format").value;
    if (type === "text") return {};
    if (type === "json_object") return { response_format: { type } };
    const schema = read("schema", "the JSON schema");
    return { response_format: { type, json_schema: { name: "answer", schema, strict: true } } };
  }

  #tools() {
    if (!at("tools").value.trim()) return {};
    const tools = read("tools", "the list of functions");
    if (!Array.isArray(tools)) throw refuse(at("tools"), "the functions must be a JSON list: [ … ]");
    const choice = at("tool-choice").value;
    const name = choice.startsWith("function:") ? choice.slice("function:".length) : "";
    return { tools, tool_choice: name ? { type: "function", function: { name } } : choice };
  }

  // One choice for each function that can be read.
  #nameTools() {
    const select = at("tool-choice");
    const chosen = select.value;
    for (const option of [...select.options].slice(3)) option.remove();
    let tools = [];
    try {
      tools = JSON.parse(at("tools").value);
    } catch {
      // It is being written.
    }
    for (const tool of Array.isArray(tools) ? tools : []) {
      const name = tool?.function?.name;
      if (typeof name === "string") select.add(new Option(`${name}, and must`, `function:${name}`));
    }
    select.value = chosen;
    if (select.selectedIndex < 0) select.selectedIndex = 0;
    fault(at("tools"), "");
  }
}

function read(id, what) {
  try {
    return JSON.parse(at(id).value);
  } catch (error) {
    throw refuse(at(id), `${what} is not valid JSON: ${error.message}`);
  }
}

function refuse(field, message) {
  fault(field, message);
  return new SettingsError(field, message);
}

function fault(field, message) {
  if (message) field.setAttribute("aria-invalid", "true");
  else field.removeAttribute("aria-invalid");
  const place = document.getElementById(`${field.id}-error`);
  if (place) place.textContent = message;
}

function labelOf(field) {
  return field.labels[0]?.textContent ?? field.id;
}
