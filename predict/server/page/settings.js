// Settings: their table, their checks, and where a browser keeps them.

const SAVED = "regatta.settings"; // localStorage: for the next visit

/** Numbers where no kind is said. Left empty, the server's own default holds: nothing is sent. */
export const FIELDS = [
  {
    key: "temperature",
    label: "Temperature",
    min: 0,
    max: 100,
    hint: "0 always takes the likeliest token",
  },
  {
    key: "top_p",
    label: "Top p",
    min: 0,
    max: 1,
    hint: "likeliest tokens up to this sum of probabilities",
  },
  {
    key: "top_k",
    label: "Top k",
    kind: "integer",
    min: 0,
    max: 2 ** 31 - 1,
    hint: "likeliest tokens to choose from",
  },
  {
    key: "repetition_penalty",
    label: "Repetition penalty",
    min: 0.01,
    max: 100,
    hint: "above 1 repeats less",
  },
  {
    key: "max_tokens",
    label: "Max tokens",
    kind: "integer",
    min: 1,
    max: 2 ** 31 - 1,
    hint: "longest answer",
  },
  {
    key: "seed",
    label: "Seed",
    kind: "integer",
    min: 0,
    max: 2 ** 31 - 1,
    hint: "the same seed, the same answer",
  },
  {
    key: "stop",
    label: "Stop strings",
    kind: "lines",
    max: 16,
    hint: "one a line; \\n stands for a new line",
  },
];

/**
 * The value that a field's text gives, as a request holds it; undefined when it is empty.
 * An Error says what is allowed.
 */
export function valueOf(field, text) {
  if (text.trim() === "") return undefined;
  if (field.kind === "lines") {
    const lines = text.split("\n").filter((line) => line !== "");
    if (lines.length > field.max) throw new Error(`${field.max} at the most.`);
    return lines.map(unescaped);
  }
  const value = Number(text);
  const isRight = field.kind === "integer" ? Number.isInteger(value) : Number.isFinite(value);
  if (!isRight || value < field.min || value > field.max) {
    const kind = field.kind === "integer" ? "A whole number" : "A number";
    throw new Error(`${kind} from ${field.min} to ${field.max}.`);
  }
  return value;
}

function unescaped(line) {
  const known = { n: "\n", t: "\t", "\\": "\\" };
  return line.replace(/\\([nt\\])/g, (_, character) => known[character]);
}

/** The settings of this browser: texts by their fields, and the model. */
export class Settings {
  constructor() {
    this.model = "";
    this.texts = {};
    const saved = read("localStorage", SAVED);
    if (typeof saved?.model === "string") this.model = saved.model;
    for (const { key } of FIELDS) {
      if (typeof saved?.texts?.[key] === "string") this.texts[key] = saved.texts[key];
    }
  }

  save() {
    write("localStorage", SAVED, { model: this.model, texts: this.texts });
  }

  /** What a request says: the fields that are set and right. */
  request() {
    const request = { model: this.model };
    for (const field of FIELDS) {
      try {
        const value = valueOf(field, this.texts[field.key] ?? "");
        if (value !== undefined) request[field.key] = value;
      } catch {
        // The form shows what is wrong with it, and it is not sent.
      }
    }
    return request;
  }
}

const inTab = (name) => ({
  get: () => read("sessionStorage", name) ?? "",
  set: (text) => write("sessionStorage", name, text || null),
});

/** Texts that this tab keeps until it is closed: the API key and the conversation. */
export const tab = Object.defineProperties(
  {},
  { key: inTab("regatta.key"), conversation: inTab("regatta.conversation") },
);

/** Keeps the theme, where theme.js finds it. */
export function saveTheme(theme) {
  try {
    localStorage.setItem("regatta.theme", theme);
  } catch {
    // It holds until the page is left.
  }
}

// A browser may forbid storage; then even its name throws.
function read(storage, name) {
  try {
    return JSON.parse(window[storage].getItem(name));
  } catch {
    return null;
  }
}

/** Null takes it away. What does not fit is not kept. */
function write(storage, name, value) {
  try {
    window[storage].removeItem(name);
    if (value !== null) window[storage].setItem(name, JSON.stringify(value));
  } catch {
    // Full, or forbidden: the page works without.
  }
}
