// Turns of the conversation as the page shows them.

import { codeOf } from "./code.js";
import { button, copyButton, element } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { pictureRow } from "./pictures.js";
import { duration, statsWords } from "./stats.js";
import { words } from "./words.js";

const REST = 4; // a picture is drawn when this many times its own cost has gone by

/** One turn. Its actions: edit(text), regenerate(), remove(), enterKey(). */
export class TurnView {
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    const isUser = turn.role === "user";
    this.body = element("div", { class: "body" });
    this.below = element("div", { class: "below" });
    this.element = element(
      "article",
      { class: `turn ${turn.role}` },
      element("h2", isUser ? { class: "unseen" } : {}, isUser ? words("You") : turn.model || words("Model")),
      this.body,
      this.below,
    );
    this.answer = isUser ? null : new AnswerView(this.body, turn);
    this.redraw();
  }

  /** Shows the turn as it is now, from the start. */
  redraw() {
    if (this.answer) this.answer.redraw();
    else this.drawMessage();
    this.drawBelow();
  }

  drawMessage() {
    const { content, pictures = [] } = this.turn;
    this.body.replaceChildren();
    if (pictures.length > 0) this.body.append(pictureRow(pictures));
    this.body.append(content);
  }

  /** Begins to follow an answer that comes; drawn: called when there is more to see. */
  follow(drawn) {
    this.element.setAttribute("aria-busy", "true");
    this.below.replaceChildren();
    this.answer.begin(drawn);
  }

  /** Takes an event's new text. */
  grow(text) {
    this.answer.grow(text);
  }

  /** Shows the whole answer, which has ended. */
  finish() {
    this.element.removeAttribute("aria-busy");
    this.answer.finish();
    this.drawBelow();
  }

  drawBelow() {
    const { turn, actions } = this;
    const isUser = turn.role === "user";
    this.below.replaceChildren();
    if (turn.stats) this.below.append(this.statsLine());
    if (turn.error) this.body.append(this.errorBox(turn.error));
    const name = isUser ? "message" : "answer";
    this.editButton = button("Edit", () => this.edit(), { "aria-label": `Edit this ${name}` });
    const isEmpty = turn.content === "";
    const row = element(
      "div",
      { class: "actions" },
      isEmpty ? null : copyButton(() => turn.content, `Copy this ${name}`),
      isEmpty ? null : this.editButton,
      isUser || turn.error
        ? null
        : button("Regenerate", actions.regenerate, { "aria-label": "Regenerate this answer" }),
      button("Delete", actions.remove, {
        "aria-label": `Delete this ${name}`,
        title: isUser ? "Deletes the message and its answer" : "Deletes the answer",
      }),
    );
    this.below.append(row);
  }

  statsLine() {
    const { turn } = this;
    const said = statsWords(turn.stats);
    if (turn.finish === "stopped") said.push(words("stopped"));
    if (turn.finish === "length") said.push(words("cut at the limit of tokens"));
    const parts = said.map((each) => element("span", {}, each));
    if (turn.stats.perSecond !== null) parts[0].className = "speed";
    return element("p", { class: "stats" }, ...parts);
  }

  errorBox(error) {
    const { detail, retryAt } = error;
    const time = retryAt && `It asks to try again at ${retryAt.toLocaleTimeString()}.`;
    const key = error.status === 401 ? button("Enter the key", this.actions.enterKey) : null;
    return element(
      "div",
      { class: "error", role: "alert" },
      element("p", {}, error.message),
      detail ? element("p", { class: "detail" }, detail) : null,
      time ? element("p", {}, time) : null,
      element("div", { class: "row" }, key, button("Try again", this.actions.regenerate)),
    );
  }

  /** Puts a text box in the turn's place. */
  edit() {
    const isUser = this.turn.role === "user";
    const area = element("textarea", {
      "aria-label": words(isUser ? "Your message" : "The answer"),
      rows: Math.min(Math.max(this.turn.content.split("\n").length + 1, 3), 16),
    });
    area.value = this.turn.content;
    const close = () => {
      this.element.classList.remove("editing");
      form.replaceWith(this.body);
      this.below.hidden = false;
    };
    const cancel = () => {
      close();
      this.editButton.focus();
    };
    const save = () => {
      if (isUser && area.value.trim() === "" && !this.turn.pictures?.length) return;
      close();
      this.actions.edit(area.value);
    };
    const hint = isUser ? "What follows this message goes." : "Later messages see this text.";
    const form = element(
      "div",
      { class: "edit" },
      area,
      element(
        "div",
        { class: "row" },
        button(isUser ? "Send" : "Save", save, { class: "primary" }),
        button("Cancel", cancel),
        element("span", { class: "hint" }, words(hint)),
      ),
    );
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation(); // it would stop an answer
        cancel();
      } else if (isEnter(event) && (isUser || event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        save();
      }
    });
    this.element.classList.add("editing");
    this.body.replaceWith(form);
    this.below.hidden = true;
    area.focus();
  }
}

/** Whether a key is an Enter that sends: not with Shift, and not one that chooses a character. */
export function isEnter(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229;
}

/** The inside of an answer: reasoning, text, calls of tools. */
class AnswerView {
  constructor(body, turn) {
    this.body = body;
    this.turn = turn;
    this.isDue = false;
    this.isLive = false;
  }

  redraw() {
    this.begin(() => {});
    this.grow(this.turn.content);
    this.finish();
  }

  begin(drawn) {
    this.drawn = drawn;
    this.isLive = true;
    this.started = performance.now();
    this.thought = null; // seconds of reasoning
    this.numReasoned = 0; // characters that are shown
    this.rested = 0; // the time ahead of which nothing is drawn
    this.text = element("div", { class: "text" });
    this.markdown = new MarkdownView(this.text);
    this.reasoningText = element("div");
    this.reasoningName = element("summary", {}, words("Reasoning"));
    this.reasoning = element(
      "details",
      { class: "reasoning", hidden: true },
      this.reasoningName,
      this.reasoningText,
    );
    this.body.replaceChildren(this.reasoning, this.text);
  }

  grow(text) {
    this.markdown.append(text);
    if (text && this.turn.reasoning && this.thought === null) {
      this.thought = (performance.now() - this.started) / 1000;
    }
    if (this.isDue || !this.isLive) return;
    this.isDue = true;
    // Drawing takes a fifth of the time at the most, however long the last block is.
    const wait = this.rested - performance.now();
    const frame = () => requestAnimationFrame(() => this.draw());
    if (wait > 4) setTimeout(frame, wait);
    else frame();
  }

  draw() {
    this.isDue = false;
    if (!this.isLive) return;
    const start = performance.now();
    this.drawReasoning();
    this.markdown.show();
    this.rested = performance.now() + REST * (performance.now() - start);
    this.drawn();
  }

  drawReasoning() {
    const { reasoning } = this.turn;
    if (!reasoning) return;
    this.reasoning.hidden = false;
    if (reasoning.length > this.numReasoned)
      this.reasoningText.append(reasoning.slice(this.numReasoned));
    this.numReasoned = reasoning.length;
    const isLive = this.isLive && this.turn.content === "";
    const live = words(isLive ? "Reasoning…" : "Reasoning");
    const name = this.thought === null ? live : `Reasoned for ${duration(this.thought)}`;
    if (this.reasoningName.textContent !== name) this.reasoningName.textContent = name;
  }

  finish() {
    const { drawn } = this;
    this.isLive = false;
    this.drawReasoning();
    this.markdown.finish();
    if (this.turn.toolCalls.length > 0) {
      this.body.append(element("div", { class: "text" }, ...this.turn.toolCalls.map(callBox)));
    }
    drawn();
  }
}

/** A call of a tool, as JSON. */
function callBox({ name, arguments: given }) {
  let value = given;
  try {
    value = JSON.parse(given);
  } catch {
    // Arguments that are not JSON are shown as the text that they are.
  }
  return element(
    "details",
    { class: "call", open: true },
    element("summary", {}, `Calls ${name || "a tool"}`),
    codeOf("json", `${JSON.stringify({ name, arguments: value }, null, 2)}\n`),
  );
}
