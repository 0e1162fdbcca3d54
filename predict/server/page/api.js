// The server: its models, its answers piece by piece, and its refusals in plain words.

import { EventParser } from "./sse.js";
import { words as inWords } from "./words.js";

const MAX_WORDS = 1200; // of what a server says in an error
const WORDS = {
  400: "The server does not take this request.",
  401: "The server asks for an API key.",
  403: "This API key may not do that.",
  404: "The server does not have this.",
  408: "The server waited too long for the request.",
  413: "The conversation is too long for this server.",
  422: "The server does not take this request.",
  429: "The server has too much to do.",
  500: "The server failed.",
  502: "The server behind this address does not answer.",
  503: "The server is not ready.",
  504: "The server behind this address does not answer in time.",
};
export const UNREACHABLE = "The server cannot be reached. Is it running, and is the network up?";
export const BROKEN = "The connection ended before the answer did.";

/** A request that failed, in words for who reads the page. */
export class ServerError extends Error {
  /**
   * @param {string} words
   * @param {{status?: number, detail?: string, retryAt?: Date|null}} more
   *   detail: the server's own words
   */
  constructor(words, more = {}) {
    super(inWords(words));
    Object.assign(this, { status: 0, detail: "", retryAt: null }, more);
  }
}

/** The server's models, and its adapters: those have the model that they belong to as `parent`. */
export async function listModels(key) {
  const response = await send("v1/models", key);
  const body = parse(await response.text());
  const models = Array.isArray(body?.data) ? body.data : [];
  return models
    .filter((model) => typeof model?.id === "string")
    .map(({ id, parent }) => ({ id, parent: typeof parent === "string" ? parent : null }));
}

/** The tree of a formula's MathML; ServerError where the server makes none of it. */
export async function formulaTree(latex, display, key) {
  const body = JSON.stringify({ latex, display });
  const response = await send("page/formula", key, { method: "POST", body });
  return parse(await response.text())?.tree ?? null;
}

/** The events of an answer, as objects. Ends with the answer; ServerError when that fails. */
export async function* chatEvents(request, key, signal) {
  const response = await send("v1/chat/completions", key, {
    method: "POST",
    body: JSON.stringify(request),
    signal,
  });
  const reader = response.body.getReader();
  const parser = new EventParser();
  let isDone = false;
  try {
    for (;;) {
      const { done, value } = await connected(reader.read(), BROKEN);
      if (done) throw new ServerError(BROKEN);
      for (const data of parser.feed(value)) {
        isDone = data === "[DONE]";
        if (isDone) return;
        yield checked(parse(data));
      }
    }
  } finally {
    // Read to its end, a connection serves the next request; cancelled, it is closed.
    (isDone ? reader.read() : reader.cancel()).catch(() => {});
  }
}

async function send(path, key, options = {}) {
  const headers = options.body ? { "Content-Type": "application/json" } : {};
  if (key) headers.Authorization = `Bearer ${key}`;
  const all = { cache: "no-store", credentials: "same-origin", ...options, headers };
  const response = await connected(fetch(path, all), UNREACHABLE);
  if (!response.ok) throw await refusal(response);
  return response;
}

/** What a promise of the network gives; its failure is a ServerError, unless it was stopped. */
async function connected(promise, words) {
  try {
    return await promise;
  } catch (error) {
    throw error?.name === "AbortError" ? error : new ServerError(words);
  }
}

/** The ServerError that a response stands for. */
async function refusal(response) {
  const text = await response.text().catch(() => "");
  const known = WORDS[response.status] ?? `The server answers with status ${response.status}.`;
  return new ServerError(known, {
    status: response.status,
    detail: serverWords(text),
    retryAt: retryTime(response.headers.get("Retry-After")),
  });
}

/** The message of an error's body: OpenAI's, FastAPI's, or a short text that is no HTML. */
function serverWords(text) {
  let body;
  try {
    body = JSON.parse(text);
  } catch {
    return text.trimStart().startsWith("<") ? "" : text.trim().slice(0, MAX_WORDS);
  }
  const found = body?.error?.message ?? body?.message ?? body?.detail ?? body?.error ?? "";
  return (typeof found === "string" ? found : JSON.stringify(found)).slice(0, MAX_WORDS);
}

/** When Retry-After allows the next try, in seconds or as a date; null when it says nothing. */
export function retryTime(header, now = Date.now()) {
  if (/^\d{1,6}$/.test(header ?? "")) return new Date(now + 1000 * Number(header));
  const isDate = /^[A-Z][a-z]{2}, \d\d [A-Z][a-z]{2} \d{4} /.test(header ?? "");
  const time = isDate ? Date.parse(header) : Number.NaN; // it would take "-3" for a date
  return Number.isNaN(time) ? null : new Date(time);
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new ServerError("The server sent something that is not JSON.", {
      detail: text.slice(0, 200),
    });
  }
}

/** An event; ServerError when it says that the answer failed. */
function checked(event) {
  if (event?.error || event?.object === "error") {
    throw new ServerError("The server could not finish the answer.", {
      detail: serverWords(JSON.stringify(event)),
      status: Number.isInteger(event.error?.code) ? event.error.code : 0,
    });
  }
  return event;
}
