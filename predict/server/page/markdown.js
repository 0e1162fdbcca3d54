// Markdown that comes in pieces, as nodes: what is complete is made once and stays as it is.

import { NOTHING, Writer, closesFence, dedent, nextBlock } from "./blocks.js";
import { CodeBlock } from "./code.js";

/**
 * Shows a growing Markdown text in an element.
 *
 * Only the last block can change while text comes, so only its nodes are made again: the last item
 * of a list, the last row of a table. Code that is still open grows in its place.
 */
export class MarkdownView {
  constructor(parent) {
    this.writer = new Writer(parent);
    this.lines = []; // complete ones of the block that is still open
    this.tail = ""; // the line that is not complete
    this.drafts = []; // nodes that the next show() replaces
    this.restored = null; // the writer's state ahead of them
    this.code = null; // { block, fence } while a fence is open
  }

  /** Takes a piece of text; nothing is shown until show(). */
  append(text) {
    const pieces = text.split("\n");
    pieces[0] = this.tail + pieces[0];
    this.tail = pieces.pop();
    for (const line of pieces) this.lines.push(line.endsWith("\r") ? line.slice(0, -1) : line);
  }

  /** Brings the element up to date. */
  show() {
    this.settle();
    if (this.code) {
      this.code.block.show(this.isClosing(this.tail) ? "" : this.tail);
      return;
    }
    this.restored = this.writer.open;
    this.drafts = this.writer.writeAll(this.tail ? [...this.lines, this.tail] : this.lines);
  }

  /** Shows the whole text, which has ended. */
  finish() {
    if (this.tail) this.append("\n");
    this.settle();
    if (this.code) this.code.block.show();
    else this.writer.writeAll(this.lines);
    this.code = null;
    this.lines = [];
  }

  /** Makes the nodes of what is complete, for good, and takes away those that are not. */
  settle() {
    for (const node of this.drafts) node?.remove();
    this.drafts = [];
    if (this.restored) this.writer.open = this.restored;
    this.restored = null;
    let at = 0;
    while (at < this.lines.length) {
      if (this.code) at = this.grow(at);
      else {
        const block = nextBlock(this.lines, at, this.writer.open.table !== null);
        if (block.kind === "fence" && !block.isComplete) {
          const { fence } = block;
          this.code = { block: new CodeBlock(fence.language), fence };
          this.writer.open = NOTHING;
          this.writer.add(this.code.block.element);
          at += 1;
        } else if (block.isComplete) {
          this.writer.write(block, this.lines.slice(at, block.end));
          at = block.end;
        } else break;
      }
    }
    this.lines.splice(0, at);
  }

  /** Takes lines into the open code; returns the place behind them. */
  grow(start) {
    const { block, fence } = this.code;
    let at = start;
    while (at < this.lines.length && !closesFence(this.lines[at], fence)) at += 1;
    const lines = this.lines.slice(start, at).map((line) => `${dedent(line, fence.indent)}\n`);
    block.append(lines.join(""));
    if (at === this.lines.length) return at;
    block.show();
    this.code = null;
    return at + 1;
  }

  /** Whether a line that is not complete may become the end of the code. */
  isClosing(line) {
    const text = line.trim();
    return text !== "" && text === this.code.fence.mark[0].repeat(text.length);
  }
}
