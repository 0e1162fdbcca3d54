// What stands within a paragraph: emphasis, code, links. Text in, nodes out; no HTML is read.
// Every step is linear in the text: it comes from a model, and a model may write anything.

import { element } from "./dom.js";
import { formula } from "./formulas.js";

const MAX_DEPTH = 16; // elements inside one another: browsers lay them out by recursion
const MAX_URL = 2000;
const PROTOCOLS = new Set(["http:", "https:", "mailto:"]);
const ENTITIES = {
  amp: "&",
  lt: "<",
  gt: ">",
  quot: '"',
  apos: "'",
  nbsp: "\u00a0",
  copy: "©",
  hellip: "…",
  mdash: "—",
  ndash: "–",
  rarr: "→",
  larr: "←",
  times: "×",
  deg: "°",
  middot: "·",
  bull: "•",
};
const PLAIN = /[^\\`*_~[\]!<&$\nhH]+/y;
const BARE_URL = new RegExp(
  `https?://[^\\s<>"\`[\\]{}|\\\\\u3000-\u303f\uff00-\uffef]{1,${MAX_URL}}`,
  "iy",
);
const ANGLE = new RegExp(
  `<((?:https?://|mailto:)[^\\s<>]{1,${MAX_URL}}|[\\w.+-]{1,64}@[\\w.-]{1,255})>`,
  "iy",
);
const BREAK = /<br[ \t]{0,9}\/?>/iy;
const ENTITY = /&(?:#(\d{1,7})|#x([0-9a-f]{1,6})|([a-z]{2,8}));/iy;
const DELIMITERS = /\*+|_+|~+/y;
const ESCAPED = /[!-/:-@[-`{-~]/;
const SPACE = /\s/;
const PUNCTUATION = /[\p{P}\p{S}]/u;
// Chinese, Japanese and Korean put no spaces around words: emphasis may end beside any of them.
const UNSPACED = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Hangul}]/u;
const WORD = /[\p{L}\p{N}]/u;
// What a model writes as a formula: its _ and * are no emphasis.
const FORMULAS = [
  ["\\(", "\\)"],
  ["\\[", "\\]"],
  ["$$", "$$"],
];

/**
 * The address that a link may have, or null: absolute, of the web or of mail, and without a user's
 * name, which makes `https://bank.example@elsewhere.example` look like another host.
 */
export function safeUrl(text) {
  let url;
  try {
    url = new URL(text);
  } catch {
    return null;
  }
  return PROTOCOLS.has(url.protocol) && !url.username && !url.password ? url.href : null;
}

/** A link that leaves the page: the new tab gets no handle of this one, and no referrer. */
function link(href, kind, ...children) {
  const attributes = { href, target: "_blank", rel: "noopener noreferrer", title: href };
  return element("a", { ...attributes, class: kind }, ...children);
}

/** Appends what a text of Markdown's inline syntax shows to `parent`. */
export function appendInline(text, parent) {
  write(new Scanner(text).scan(), parent);
}

/** Cuts a text into tokens, and marks which delimiters and brackets belong together. */
class Scanner {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.tokens = [];
    this.delimiters = []; // those that may still open or close emphasis
    this.brackets = []; // those that may still open a link
    this.inactive = 0; // brackets below stand around a link: no link holds another
    this.runs = null; // of backticks: length -> places, for code
    this.missing = new Set(); // closing marks of formulas that do not come any more
  }

  scan() {
    while (this.at < this.text.length) {
      const plain = this.match(PLAIN);
      if (plain) this.take(plain[0]);
      else if (!this.special(this.text[this.at])) this.take(this.text[this.at]);
    }
    pair(this.delimiters, 0);
    return this.tokens;
  }

  /** Adds a text as it is, and goes past it. */
  take(text) {
    return this.add({ kind: "text", text }, text.length);
  }

  add(token, length) {
    this.tokens.push(token);
    this.at += length;
    return true;
  }

  match(pattern) {
    pattern.lastIndex = this.at;
    return pattern.exec(this.text);
  }

  /** Reads what starts with a character that may mean something; false when it is only text. */
  special(character) {
    switch (character) {
      case "\\":
        return this.formula() || this.escape();
      case "$":
        return this.formula();
      case "\n":
        return this.add({ kind: "break" }, 1);
      case "`":
        return this.code();
      case "*":
      case "_":
      case "~":
        return this.delimiter();
      case "!":
        return this.text[this.at + 1] === "[" && this.open(true);
      case "[":
        return this.open(false);
      case "]":
        return this.close();
      case "<":
        return this.angle();
      case "&":
        return this.entity();
      default:
        return this.url();
    }
  }

  escape() {
    const next = this.text[this.at + 1];
    if (next === "\n") return this.add({ kind: "break" }, 2);
    if (next === undefined || !ESCAPED.test(next)) return false;
    return this.add({ kind: "text", text: next }, 2);
  }

  formula() {
    for (const [start, end] of FORMULAS) {
      if (this.missing.has(end) || !this.text.startsWith(start, this.at)) continue;
      const stop = this.text.indexOf(end, this.at + 2);
      if (stop < 0) this.missing.add(end);
      else {
        const text = this.text.slice(this.at, stop + 2);
        return this.add({ kind: "code", text, name: "formula" }, text.length);
      }
    }
    return false;
  }

  code() {
    this.runs ??= backtickRuns(this.text);
    const length = this.match(/`+/y)[0].length;
    const places = this.runs.get(length) ?? []; // none: the run starts behind an escaped backtick
    places.next ??= 0;
    while (places.next < places.length && places[places.next] <= this.at) places.next += 1;
    if (places.next === places.length) return this.take("`".repeat(length));
    const stop = places[places.next];
    let text = this.text.slice(this.at + length, stop).replaceAll("\n", " ");
    if (text.startsWith(" ") && text.endsWith(" ") && text.trim()) text = text.slice(1, -1);
    return this.add({ kind: "code", text }, stop + length - this.at);
  }

  delimiter() {
    const [run] = this.match(DELIMITERS);
    if (run[0] === "~" && run.length !== 2) return this.take(run);
    const before = characterBefore(this.text, this.at);
    const end = this.at + run.length;
    const [after = " "] = this.text.slice(end, end + 2); // a code point
    const [left, right] = [flanks(after, before), flanks(before, after)];
    const within = run[0] === "_" && left && right; // snake_case
    const token = {
      kind: "delimiter",
      character: run[0],
      size: run.length,
      left: run.length,
      opens: [],
      closes: [],
      canOpen: left && (!within || PUNCTUATION.test(before)),
      canClose: right && (!within || PUNCTUATION.test(after)),
    };
    this.delimiters.push(token);
    return this.add(token, run.length);
  }

  open(isImage) {
    const text = isImage ? "![" : "[";
    const token = { kind: "bracket", text, isImage, href: null, bottom: this.delimiters.length };
    this.brackets.push(token);
    return this.add(token, text.length);
  }

  close() {
    const opener = this.brackets.pop();
    const isActive = opener && (opener.isImage || this.brackets.length >= this.inactive);
    this.inactive = Math.min(this.inactive, this.brackets.length);
    const target = isActive && this.text[this.at + 1] === "(" ? this.target(this.at + 2) : null;
    const href = target && safeUrl(target.address);
    if (!href) return false;
    opener.href = href;
    pair(this.delimiters, opener.bottom);
    this.delimiters.length = opener.bottom;
    if (!opener.isImage) this.inactive = this.brackets.length;
    return this.add({ kind: "end", text: "]" }, target.end - this.at);
  }

  /** The address behind `](`, and the place behind its `)`; null when there is no such thing. */
  target(at) {
    const part = this.text.slice(at, at + MAX_URL + 500);
    const found =
      /^[ \n]?<([^<>\n]*)>/.exec(part) ??
      /^[ \n]?((?:[^\s()\\]|\\.|\((?:[^\s()\\]|\\.|\([^\s()]{0,200}\)){0,500}\)){1,2000})/.exec(
        part,
      );
    if (!found) return null;
    const rest = /^(?:\s{1,9}(?:"[^"]{0,300}"|'[^']{0,300}'))?\s{0,9}\)/.exec(
      part.slice(found[0].length),
    );
    if (!rest) return null;
    const address = found[1].replace(/\\([!-/:-@[-`{-~])/g, "$1");
    return { address, end: at + found[0].length + rest[0].length };
  }

  angle() {
    if (this.match(BREAK)) return this.add({ kind: "break" }, this.match(BREAK)[0].length);
    const found = this.match(ANGLE);
    if (!found) return false;
    const href = safeUrl(found[1]) ?? safeUrl(`mailto:${found[1]}`);
    return href !== null && this.add({ kind: "link", text: found[1], href }, found[0].length);
  }

  entity() {
    const found = this.match(ENTITY);
    if (!found) return false;
    const [all, decimal, hex, name] = found;
    const code = decimal ? Number(decimal) : Number.parseInt(hex, 16);
    const known = name && Object.hasOwn(ENTITIES, name) ? ENTITIES[name] : null;
    const text = name ? known : code > 0 && code < 0x110000 ? String.fromCodePoint(code) : null;
    return text !== null && this.add({ kind: "text", text }, all.length);
  }

  url() {
    const found = WORD.test(characterBefore(this.text, this.at)) ? null : this.match(BARE_URL);
    if (!found) return false;
    let text = found[0];
    let unopened = text.split(")").length - text.split("(").length;
    while (/[.,;:!?'*_~)]$/.test(text)) {
      if (text.endsWith(")") && unopened-- <= 0) break;
      text = text.slice(0, -1);
    }
    const href = safeUrl(text);
    return href !== null && this.add({ kind: "link", text, href }, text.length);
  }
}

/** The code point ahead of a place, or a space. */
function characterBefore(text, at) {
  return [...text.slice(Math.max(at - 2, 0), at)].pop() ?? " ";
}

/** Whether a delimiter stands at the side of what it would emphasize. */
function flanks(inner, outer) {
  if (SPACE.test(inner)) return false;
  return (
    !PUNCTUATION.test(inner) || [SPACE, PUNCTUATION, UNSPACED].some((kind) => kind.test(outer))
  );
}

/** Where runs of backticks start, by their lengths. */
function backtickRuns(text) {
  const runs = new Map();
  for (const { 0: run, index } of text.matchAll(/`+/g)) {
    if (!runs.has(run.length)) runs.set(run.length, []);
    runs.get(run.length).push(index);
  }
  return runs;
}

/**
 * Pairs delimiters[bottom:]: each closing one with the nearest that opens, as CommonMark does.
 * Writes the elements to open and to close into the tokens.
 */
function pair(delimiters, bottom) {
  const stack = [];
  const floors = new Map(); // below which there is no opener for such a closer
  for (let at = bottom; at < delimiters.length; at += 1) {
    const closer = delimiters[at];
    while (closer.canClose && closer.left > 0) {
      const key = `${closer.character}${closer.canOpen}${closer.size % 3}`;
      let found = stack.length - 1;
      const floor = floors.get(key) ?? 0;
      while (found >= floor && !fits(stack[found], closer)) found -= 1;
      if (found < floor) {
        floors.set(key, stack.length);
        break;
      }
      stack.length = found + 1; // what stands between stays text
      const opener = stack[found];
      const used = opener.left > 1 && closer.left > 1 ? 2 : 1;
      const name = closer.character === "~" ? "del" : used === 2 ? "strong" : "em";
      const mark = closer.character.repeat(used);
      opener.opens.unshift({ name, mark });
      closer.closes.push({ name, mark });
      opener.left -= used;
      closer.left -= used;
      if (opener.left === 0) stack.pop();
      for (const [each, height] of floors) floors.set(each, Math.min(height, stack.length));
    }
    if (closer.canOpen && closer.left > 0) stack.push(closer);
  }
}

function fits(opener, closer) {
  if (opener.character !== closer.character) return false;
  if (closer.character === "~" || (!opener.canClose && !closer.canOpen)) return true;
  return (opener.size + closer.size) % 3 !== 0 || (opener.size % 3 === 0 && closer.size % 3 === 0);
}

/** Makes nodes of tokens. What would stand too deep is shown as its marks. */
function write(tokens, parent) {
  const stack = [];
  let inLink = 0;
  let text = "";
  let current = parent;
  const flush = () => {
    if (text) current.append(text);
    text = "";
  };
  const enter = (make, mark) => {
    if (stack.length >= MAX_DEPTH) {
      text += mark;
      stack.push(null);
      return;
    }
    flush();
    stack.push(current);
    current = current.appendChild(make());
  };
  const leave = (mark) => {
    const outer = stack.pop();
    if (outer) {
      flush();
      current = outer;
    } else text += mark;
  };
  for (const token of tokens) {
    if (token.kind === "text") text += token.text;
    else if (token.kind === "delimiter") {
      for (const { mark } of token.closes) leave(mark);
      text += token.character.repeat(token.left);
      for (const { name, mark } of token.opens) enter(() => element(name), mark);
    } else if (token.kind === "bracket") {
      if (token.href === null) text += token.text;
      else {
        // A picture is a link to it: nothing is loaded from where a model says. No links in links.
        const make = inLink
          ? () => element("span")
          : () => link(token.href, token.isImage ? "image" : null);
        enter(make, token.text);
        inLink += 1;
      }
    } else if (token.kind === "end") {
      inLink -= 1;
      leave(token.text);
    } else {
      flush();
      if (token.kind === "break") current.append(element("br"));
      else if (token.kind === "code") {
        const { name, text: written } = token;
        current.append(name ? formula(written) : element("code", {}, written));
      } else if (inLink) text += token.text;
      else {
        current.append(link(token.href, null, token.text));
      }
    }
  }
  flush();
}
