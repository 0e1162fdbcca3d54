// A conversation: its turns, what of it a server is asked, and its form in a file.

import { isPicture } from "./pictures.js";

const FORMAT = "regatta-conversation";
const MAX_FILE = 64 << 20; // characters
const MAX_TURNS = 10_000;

/** A turn of the user. pictures: data URLs, which stand ahead of the text. */
export function userTurn(content, pictures = []) {
  return { role: "user", content, pictures };
}

/** A turn's content as servers take it: a text, or parts where there are pictures. */
function contentOf({ content, pictures = [] }) {
  if (pictures.length === 0) return content;
  const parts = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  return content === "" ? parts : [...parts, { type: "text", text: content }];
}

/** Two contents as one. */
function joined(content, more) {
  if (typeof content === "string" && typeof more === "string") return `${content}\n\n${more}`;
  const parts = (each) => (typeof each === "string" ? [{ type: "text", text: each }] : each);
  return [...parts(content), ...parts(more)];
}

/** A turn of the model that has nothing yet. */
export function answerTurn(model) {
  return {
    role: "assistant",
    model,
    content: "",
    reasoning: "",
    toolCalls: [],
    finish: null, // the server's reason, or "stopped" by the reader
    stats: null, // numbers of the answer, see stats.js
    error: null,
  };
}

/** Adds an event of a chat's stream to a turn; returns the text that is new in its content. */
export function applyEvent(turn, event) {
  const choice = Array.isArray(event?.choices) ? event.choices[0] : undefined;
  if (typeof choice?.finish_reason === "string") turn.finish = choice.finish_reason;
  const delta = choice?.delta ?? {};
  // Both names are in use among servers.
  const reasoning = [delta.reasoning_content, delta.reasoning];
  turn.reasoning += reasoning.find((each) => typeof each === "string") ?? "";
  if (Array.isArray(delta.tool_calls)) for (const call of delta.tool_calls) addCall(turn, call);
  if (typeof delta.content !== "string") return "";
  turn.content += delta.content;
  return delta.content;
}

function addCall(turn, call) {
  const index = Number.isInteger(call?.index) ? call.index : turn.toolCalls.length;
  if (index < 0 || index > 255) return;
  while (turn.toolCalls.length <= index) turn.toolCalls.push({ id: "", name: "", arguments: "" });
  const known = turn.toolCalls[index];
  if (typeof call?.id === "string") known.id = call.id;
  if (typeof call?.function?.name === "string") known.name += call.function.name;
  if (typeof call?.function?.arguments === "string") known.arguments += call.function.arguments;
}

/**
 * What the server is asked with these turns: OpenAI's messages. Turns of one role that follow each
 * other are one message, because many chat templates want the roles to take turns.
 */
export function messagesOf(system, turns) {
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    const { role } = turn;
    const content = contentOf(turn);
    const last = messages[messages.length - 1];
    if (role === "assistant" && content === "") continue; // it failed, or called tools alone
    if (last?.role === role) last.content = joined(last.content, content);
    else messages.push({ role, content });
  }
  return messages;
}

/** The text of a file that holds the conversation. */
export function exportText(system, turns) {
  const messages = turns.map((turn) => {
    const calls = (turn.toolCalls ?? []).map(({ id, ...call }) => {
      return { id, type: "function", function: call };
    });
    return {
      role: turn.role,
      content: contentOf(turn),
      model: turn.model || undefined,
      reasoning_content: turn.reasoning || undefined,
      tool_calls: calls.length ? calls : undefined,
      finish_reason: turn.finish || undefined,
    };
  });
  return `${JSON.stringify({ format: FORMAT, version: 1, system, messages }, null, 2)}\n`;
}

/**
 * The system prompt and the turns that a file's text holds. Also takes `{"messages": [...]}` as it
 * is sent to a server. An Error says what is wrong; nothing of a wrong file is taken.
 */
export function importText(text) {
  if (text.length > MAX_FILE) throw new Error("The file has more than 64 MiB.");
  let body;
  try {
    body = JSON.parse(text);
  } catch (error) {
    throw new Error(`The file is not JSON: ${error.message}`);
  }
  if (body?.format !== undefined && (body.format !== FORMAT || body.version !== 1)) {
    throw new Error(`The file's format is not ${FORMAT}, version 1.`);
  }
  const messages = body?.messages;
  if (!Array.isArray(messages)) throw new Error('The file has no list "messages".');
  if (messages.length > MAX_TURNS) throw new Error(`The file has more than ${MAX_TURNS} messages.`);
  const system = optional(body, "system", "The file");
  const systems = system ? [system] : [];
  const turns = [];
  for (const [index, message] of messages.entries()) {
    const turn = turnOf(message, `Message ${index + 1}`);
    if (turn.role === "system") systems.push(turn.content);
    else turns.push(turn);
  }
  return { system: systems.join("\n\n"), turns };
}

function turnOf(message, where) {
  const role = message?.role;
  if (!["system", "user", "assistant"].includes(role)) {
    throw new Error(
      `${where} has the role ${JSON.stringify(role)}; there are system, user and assistant.`,
    );
  }
  let content = message.content ?? (role === "assistant" ? "" : null);
  let pictures = [];
  if (role === "user" && Array.isArray(content)) [content, pictures] = ofParts(content);
  if (typeof content !== "string") {
    throw new Error(`The content of ${where.toLowerCase()} is not text.`);
  }
  if (role === "user") return userTurn(content, pictures);
  if (role === "system") return { role, content };
  const turn = answerTurn(optional(message, "model", where));
  turn.content = content;
  turn.reasoning = optional(message, "reasoning_content", where);
  turn.finish = optional(message, "finish_reason", where) || null;
  const calls = message.tool_calls ?? [];
  if (!Array.isArray(calls)) throw new Error(`${where}: tool_calls is not a list.`);
  for (const call of calls) addCall(turn, { ...call, index: undefined });
  return turn;
}

/** The text and the pictures of parts; no text where one is something else. */
function ofParts(parts) {
  const urls = parts.map((part) => (part?.type === "image_url" ? part.image_url?.url : null));
  const texts = parts.filter((_, index) => urls[index] === null);
  const isKnown = texts.every((part) => part?.type === "text" && typeof part.text === "string");
  const pictures = urls.filter((url) => url !== null);
  if (!isKnown || !pictures.every(isPicture)) return [null, []];
  return [texts.map((part) => part.text).join("\n\n"), pictures];
}

/** The text at a key, or "" where there is none. */
function optional(holder, key, where) {
  const value = holder[key] ?? "";
  if (typeof value !== "string") throw new Error(`${where}: ${key} is not text.`);
  return value;
}
