// Blocks of code: a head with the language and a button, and light colouring of a few languages.

import { copyButton, element } from "./dom.js";

const MAX_COLOURED = 100_000; // characters of a block; what is longer stays plain

const words = (text) => `\\b(?:${text.trim().split(/\s+/).join("|")})\\b`;
const DOUBLE = String.raw`"(?:[^"\\\n]|\\.)*"?`;
const SINGLE = String.raw`'(?:[^'\\\n]|\\.)*'?`;
const CHARACTER = String.raw`'(?:[^'\\\n]|\\[^\n][^'\n]{0,8})'`; // 'a of Rust is a lifetime
const TRIPLE = String.raw`"""(?:[^"\\]|\\[^]|"(?!""))*(?:"""|$)|'''(?:[^'\\]|\\[^]|'(?!''))*(?:'''|$)`;
const BACKTICKS = "`(?:[^`\\\\]|\\\\[^])*(?:`|$)";
const SLASHES = String.raw`//[^\n]*|/\*(?:[^*]|\*(?!/))*(?:\*/|$)`;
const HASH = "#[^\\n]*";

// Per grammar: comments, strings, keywords; everything has numbers.
const GRAMMARS = {
  python: [
    HASH,
    `[rRbBuUfF]{0,2}(?:${TRIPLE}|${DOUBLE}|${SINGLE})`,
    words(`
    and as assert async await break case class continue def del elif else except finally for from
    global if import in is lambda match nonlocal not or pass raise return try while with yield
    None True False self`),
  ],
  javascript: [
    SLASHES,
    `${BACKTICKS}|${DOUBLE}|${SINGLE}`,
    words(`
    abstract any as async await boolean break case catch class const continue debugger default
    delete do else enum export extends false finally for from function get if implements import in
    instanceof interface let new null number of private protected public readonly return set static
    string super switch this throw true try type typeof undefined var void while with yield`),
  ],
  c: [
    SLASHES,
    `${DOUBLE}|${CHARACTER}`,
    words(`
    abstract auto bool boolean break byte case catch chan char class const constexpr continue
    default defer delete do double else enum explicit extends extern false final finally float for
    func fn go goto if impl implements import in inline int interface let long loop map match mod
    move mut namespace new nil null nullptr operator override package private protected pub public
    range return self short signed sizeof static string struct super switch template this throw
    trait true try type typedef typename union unsafe unsigned use using var virtual void volatile
    where while`),
  ],
  shell: [
    `(?<![\\w$])${HASH}`,
    `"(?:[^"\\\\]|\\\\[^])*(?:"|$)|'[^']*(?:'|$)`,
    words(`
    if then else elif fi for while until do done case esac in function return local export set unset
    cd echo exit source sudo`),
  ],
  sql: [
    String.raw`--[^\n]*|/\*(?:[^*]|\*(?!/))*(?:\*/|$)`,
    `${SINGLE}|${DOUBLE}`,
    words(`
    add all alter and as asc between by case create cross default delete desc distinct drop else end
    exists foreign from full group having in index inner insert into is join key left like limit not
    null offset on or order outer primary references right select set table then union unique update
    using values view when where with`),
  ],
  json: ["(?!)", DOUBLE, words("true false null")],
};
const ALIASES = {
  python: "python python3 py",
  javascript: "javascript js jsx mjs typescript ts tsx",
  c: "c h cpp c++ cc cxx hpp cuda cu csharp c# cs java kotlin go golang rust rs swift scala php",
  shell: "bash sh shell zsh console",
  sql: "sql mysql postgresql sqlite",
  json: "json json5 jsonl",
};
const NUMBER = String.raw`\b(?:0[xXbB][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\b`;
const KINDS = ["comment", "string", "keyword", "number"];

/** The pattern of a language by the name that a fence gives it, or null. */
function pattern(language) {
  const named = Object.keys(ALIASES).find((key) => ALIASES[key].split(" ").includes(language));
  if (named === undefined) return null;
  const parts = [...GRAMMARS[named], NUMBER].map((part) => `(${part})`);
  return new RegExp(parts.join("|"), named === "sql" ? "gi" : "g");
}

/** A block of code that may grow: what is complete is coloured once, and stays. */
export class CodeBlock {
  constructor(language) {
    this.text = "";
    this.pattern = pattern(language.toLowerCase());
    this.settled = 0; // characters whose nodes stay
    this.code = element("code");
    this.drafts = []; // nodes behind those, which the next show() replaces
    const name = language || "text";
    this.element = element(
      "div",
      { class: "code" },
      element(
        "div",
        { class: "code-head" },
        element("span", {}, name),
        copyButton(() => this.text, `Copy code, ${name}`),
      ),
      // The keyboard scrolls only what it can reach.
      element("pre", { tabindex: 0, role: "region", "aria-label": `Code, ${name}` }, this.code),
    );
  }

  /** Adds whole lines. */
  append(text) {
    this.text += text;
  }

  /** Shows all there is, and a line that is not complete. */
  show(tail = "") {
    for (const node of this.drafts) node.remove();
    this.drafts = [];
    const text = this.text + tail;
    const isPlain = this.pattern === null || text.length > MAX_COLOURED;
    const pieces = isPlain
      ? [{ start: this.settled, end: text.length, kind: null }]
      : this.cut(text);
    // Whatever ends ahead of the last complete line will not change any more. A string or comment
    // that is still open reaches to the end, and so does not.
    const line = this.text.lastIndexOf("\n", this.text.length - 2) + 1;
    for (const { start, end, kind } of pieces) {
      const split =
        kind === null ? Math.min(Math.max(line, start), end) : end <= line ? end : start;
      if (split > start) {
        this.code.append(piece(text.slice(start, split), kind));
        this.settled = split;
      }
      if (split < end) {
        const draft = piece(text.slice(split, end), kind);
        this.code.append(draft);
        this.drafts.push(draft);
      }
    }
  }

  /** The pieces of text[settled:]: with their kinds, and what stands between with null. */
  cut(text) {
    const pieces = [];
    let at = this.settled;
    this.pattern.lastIndex = at;
    for (const found of text.matchAll(this.pattern)) {
      if (found[0] === "") continue;
      const end = found.index + found[0].length;
      if (found.index > at) pieces.push({ start: at, end: found.index, kind: null });
      pieces.push({ start: found.index, end, kind: KINDS[found.slice(1).findIndex(Boolean)] });
      at = end;
    }
    if (at < text.length) pieces.push({ start: at, end: text.length, kind: null });
    return pieces;
  }
}

/** The element of a block of code that is whole. */
export function codeOf(language, text) {
  const block = new CodeBlock(language);
  block.append(text);
  block.show();
  return block.element;
}

function piece(text, kind) {
  return kind === null ? document.createTextNode(text) : element("span", { class: kind }, text);
}
