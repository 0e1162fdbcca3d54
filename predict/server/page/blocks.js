// Blocks of Markdown: where each ends, and the nodes that it becomes.

import { codeOf } from "./code.js";
import { element } from "./dom.js";
import { appendInline } from "./inline.js";

const MAX_DEPTH = 8; // lists and quotes inside one another
const MAX_COLUMNS = 100;
const FENCE = /^[ \t]*(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})(?=[ \t]|$)/;
const QUOTE = /^ {0,3}>[ \t]?/;
const ITEM = /^([ \t]*)([-+*]|\d{1,9}[.)])(?=[ \t]|$)([ \t]{0,4}(?=[^ \t]|$))?/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}\s*$/;
const TASK = /^\[([ xX])\][ \t]/;

export const NOTHING = Object.freeze({ list: null, table: null });
const isBlank = (line) => line.trim() === "";

/** Columns of white space ahead of a line's text; a tab goes to the next multiple of four. */
function indentOf(line) {
  let columns = 0;
  for (const character of line) {
    if (character === " ") columns += 1;
    else if (character === "\t") columns += 4 - (columns % 4);
    else break;
  }
  return columns;
}

/** A line less as much of its indent as there is, up to `columns`. */
export function dedent(line, columns) {
  let at = 0;
  for (let left = columns; left > 0 && (line[at] === " " || line[at] === "\t"); at += 1) {
    left -= line[at] === "\t" ? 4 : 1;
  }
  return line.slice(at);
}

function fenceOf(line) {
  const found = FENCE.exec(line);
  if (!found) return null;
  const mark = found[1];
  const rest = line.slice(found[0].length).trim();
  if (mark[0] === "`" && rest.includes("`")) return null; // code within a line
  return { mark, language: rest.slice(0, 40).split(/\s/, 1)[0], indent: indentOf(line) };
}

/** Whether a line ends the code that a fence began. */
export function closesFence(line, { mark }) {
  const text = line.trim();
  return text.length >= mark.length && text === mark[0].repeat(text.length);
}

function itemOf(line) {
  if (RULE.test(line)) return null;
  const found = ITEM.exec(line);
  if (!found) return null;
  const [, , marker, space] = found;
  const isOrdered = marker.length > 1;
  const indent = indentOf(line);
  const isEmpty = isBlank(line.slice(found[1].length + marker.length));
  return {
    isOrdered,
    indent,
    isEmpty,
    number: isOrdered ? Number.parseInt(marker, 10) : 0,
    style: marker[marker.length - 1],
    // Five spaces and more are one, and the rest is the text's own.
    offset: indent + marker.length + (isEmpty || !space ? 1 : space.length),
    text: line.slice(found[1].length + marker.length + (isEmpty || !space ? 1 : space.length)),
  };
}

/** The cells of a table's row. `\|` is no end of a cell. */
function cells(line) {
  const parts = line.trim().split(/(?<!\\)\|/);
  if (parts.length > 1 && parts[0].trim() === "") parts.shift();
  if (parts.length > 1 && parts[parts.length - 1].trim() === "") parts.pop();
  return parts.map((cell) => cell.replaceAll("\\|", "|").trim());
}

/** How the columns of a table are aligned, if line `at` and the next are its head; else null. */
function tableHead(lines, at) {
  const rule = lines[at + 1];
  if (rule === undefined || !lines[at].includes("|")) return null;
  if (!rule.includes("-") || /[^ \t|:-]/.test(rule)) return null;
  const marks = cells(rule);
  if (marks.length > MAX_COLUMNS || marks.length !== cells(lines[at]).length) return null;
  if (!marks.every((mark) => /^:?-+:?$/.test(mark))) return null;
  return marks.map((mark) => {
    if (!mark.endsWith(":")) return mark.startsWith(":") ? "start" : null;
    return mark.startsWith(":") ? "center" : "end";
  });
}

/** Whether a line begins a block, and so ends the paragraph ahead of it. */
function interrupts(lines, at) {
  const line = lines[at];
  if (isBlank(line) || HEADING.test(line) || QUOTE.test(line) || RULE.test(line) || fenceOf(line))
    return true;
  const item = itemOf(line);
  // A year that happens to begin a line ("1986. It was") is no list.
  const isList = item !== null && item.indent < 4 && !item.isEmpty && item.number < 1000;
  return isList || tableHead(lines, at) !== null;
}

/**
 * The block that starts at lines[at], where a blank line is one: its kind, its lines [at, end), and
 * whether it is complete, which is to say that lines to come cannot change it.
 * inTable: whether the block ahead of it is a table whose rows it may go on with.
 */
export function nextBlock(lines, at, inTable) {
  const line = lines[at];
  if (isBlank(line)) return { kind: "blank", end: at + 1, isComplete: true };
  const fence = fenceOf(line);
  if (fence) {
    let end = at + 1;
    while (end < lines.length && !closesFence(lines[end], fence)) end += 1;
    const isClosed = end < lines.length;
    return { kind: "fence", fence, end: isClosed ? end + 1 : end, isClosed, isComplete: isClosed };
  }
  if (HEADING.test(line)) return { kind: "heading", end: at + 1, isComplete: true };
  if (RULE.test(line)) return { kind: "rule", end: at + 1, isComplete: true };
  const item = itemOf(line);
  if (item && item.indent < 4) return itemBlock(lines, at, item);
  if (QUOTE.test(line)) return while_("quote", lines, at, (each) => QUOTE.test(each));
  if (inTable && line.includes("|")) return { kind: "row", end: at + 1, isComplete: true };
  if (indentOf(line) >= 4) {
    return while_("indented", lines, at, (each) => isBlank(each) || indentOf(each) >= 4);
  }
  const columns = tableHead(lines, at);
  if (columns) return { kind: "table", columns, end: at + 2, isComplete: true };
  return while_("paragraph", lines, at, (_, next) => !interrupts(lines, next));
}

function while_(kind, lines, at, belongs) {
  let end = at + 1;
  while (end < lines.length && belongs(lines[end], end)) end += 1;
  return { kind, end, isComplete: end < lines.length };
}

/** The lines of a list's item: what is indented, and a paragraph's lazy lines. */
function itemBlock(lines, at, item) {
  let end = at + 1;
  let fence = null;
  for (let next = at + 1; next < lines.length; next += 1) {
    const line = lines[next];
    if (isBlank(line)) continue;
    const indent = indentOf(line);
    if (fence) {
      if (closesFence(line, fence)) fence = null;
    } else {
      // Models nest with two spaces, whatever the width of the item's own marker is.
      const isNested = indent >= Math.min(item.offset, item.indent + 2);
      const isLazy = next === end && itemOf(line) === null && !interrupts(lines, next);
      if (!isNested && !isLazy) return { kind: "item", item, end, isComplete: true };
      fence = fenceOf(line);
    }
    end = next + 1;
  }
  return { kind: "item", item, end, isComplete: false };
}

/** Appends blocks to an element; rows and items go on with the table and the list ahead of them. */
export class Writer {
  constructor(parent, depth = 0) {
    this.parent = parent;
    this.depth = depth;
    this.open = NOTHING; // { list, table } that an item and a row may join; replaced as a whole
  }

  /** Appends one block, of all these lines; returns the node that is new, if there is one. */
  write(block, lines) {
    const list = block.kind === "item" || block.kind === "blank" ? this.open.list : null;
    this.open = { list, table: block.kind === "row" ? this.open.table : null };
    return this[block.kind](lines, block);
  }

  /** Appends all blocks of lines; returns what write() does of each. */
  writeAll(lines) {
    const made = [];
    for (let at = 0; at < lines.length;) {
      const block = nextBlock(lines, at, this.open.table !== null);
      made.push(this.write(block, lines.slice(at, block.end)));
      at = block.end;
    }
    return made;
  }

  add(node) {
    return this.parent.appendChild(node);
  }

  blank() {}

  paragraph(lines) {
    const made = element("p");
    const text = lines.map((line, at) => (at ? line.trimStart() : line.trim()));
    appendInline(text.join("\n").trimEnd(), made);
    return this.add(made);
  }

  heading([line]) {
    const marks = HEADING.exec(line)[1];
    const text = line.trim().slice(marks.length).trim().replace(/(^|\s)#+$/, "").trim();
    // The page has h1, and a turn has h2.
    const made = element(`h${Math.min(marks.length + 2, 6)}`);
    appendInline(text, made);
    return this.add(made);
  }

  rule() {
    return this.add(element("hr"));
  }

  fence(lines, { fence, isClosed }) {
    const inner = lines.slice(1, isClosed ? -1 : undefined);
    const text = inner.map((line) => `${dedent(line, fence.indent)}\n`).join("");
    return this.add(codeOf(fence.language, text));
  }

  indented(lines) {
    const inner = lines.map((line) => dedent(line, 4));
    return this.add(codeOf("", `${inner.join("\n").trimEnd()}\n`));
  }

  quote(lines) {
    const made = element("blockquote");
    const inner = lines.map((line) => line.replace(QUOTE, ""));
    this.nested(made, inner);
    return this.add(made);
  }

  item(lines, { item }) {
    const made = element("li");
    let text = item.text;
    const task = TASK.exec(text);
    if (task) {
      made.className = "task";
      text = `${task[1] === " " ? "☐" : "☑"} ${text.slice(task[0].length)}`;
    }
    // As far as its first line of its own is indented: models nest with two spaces under "1." too.
    const inner = lines.slice(1);
    const indents = inner.filter((line) => !isBlank(line)).map(indentOf);
    const first = indents.find((indent) => indent > item.indent) ?? item.offset;
    const columns = Math.min(first, item.offset);
    this.nested(made, [text, ...inner.map((line) => dedent(line, columns))]);
    // A style is of lists with numbers, or of lists without.
    if (this.open.list?.style === item.style) return this.open.list.element.appendChild(made);
    const start = item.isOrdered && item.number !== 1 ? item.number : null;
    const list = element(item.isOrdered ? "ol" : "ul", { start }, made);
    this.open = { list: { element: list, style: item.style }, table: null };
    return this.add(list);
  }

  table(lines, { columns }) {
    const made = element("table", {}, element("thead"), element("tbody"));
    this.open = { list: null, table: { element: made, columns } };
    made.tHead.append(this.cells(lines[0], "th"));
    return this.add(
      element("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Table" }, made),
    );
  }

  row([line]) {
    return this.open.table.element.tBodies[0].appendChild(this.cells(line, "td"));
  }

  cells(line, name) {
    const texts = cells(line);
    const made = this.open.table.columns.map((alignment, at) => {
      const cell = element(name, { class: alignment });
      appendInline(texts[at] ?? "", cell);
      return cell;
    });
    return element("tr", {}, ...made);
  }

  /** Fills a list's item or a quote. What stands too deep is one paragraph. */
  nested(parent, lines) {
    const writer = new Writer(parent, this.depth + 1);
    if (writer.depth < MAX_DEPTH) writer.writeAll(lines);
    else writer.paragraph(lines);
  }
}
