// Formulas: the server makes MathML of them, and the page nodes of that. No HTML is read.

import { element } from "./dom.js";

const MATHML = "http://www.w3.org/1998/Math/MathML";
const MAX_KEPT = 500; // trees; an answer that grows is drawn again and again
const MAX_LENGTH = 2000; // characters; the server takes no more
const NAMES = new Set(
  (
    "math mrow mi mn mo mtext mspace msup msub msubsup mfrac msqrt mroot munder mover munderover " +
    "mtable mtr mtd mstyle mpadded mphantom mmultiscripts mprescripts none"
  ).split(" "),
);
const ATTRIBUTES = new Set(
  (
    "display displaystyle scriptlevel stretchy fence form lspace rspace accent accentunder " +
    "columnalign rowalign columnlines rowlines mathvariant linethickness minsize maxsize " +
    "movablelimits largeop symmetric separator width height depth voffset"
  ).split(" "),
);

const kept = new Map(); // text -> a tree, a promise of one, or null: it stays as it is written
let ask = null; // (latex, display) -> a promise of a tree

/** Says who makes trees of formulas; null: nobody, and they stay as they are written. */
export function setFormulas(asked) {
  ask = asked;
  kept.clear();
}

/** An element that shows a formula with its marks, as \(x\): as written, and then drawn. */
export function formula(text) {
  const shown = element("code", { class: "formula" }, text);
  if (ask === null || text.length > MAX_LENGTH) return shown;
  const known = treeOf(text);
  if (known instanceof Promise) known.then((tree) => draw(shown, tree, text));
  else draw(shown, known, text);
  return shown;
}

function treeOf(text) {
  if (!kept.has(text)) {
    if (kept.size >= MAX_KEPT) kept.delete(kept.keys().next().value);
    const display = !text.startsWith("\\(");
    const asked = ask(text.slice(2, -2), display).catch((error) => {
      if (error?.status === 404) ask = null; // this server makes none
      return null;
    });
    kept.set(text, asked);
    asked.then((tree) => kept.set(text, tree));
  }
  return kept.get(text);
}

function draw(shown, tree, text) {
  if (tree === null) return;
  try {
    const drawn = mathml(tree);
    drawn.setAttribute("alttext", text.slice(2, -2));
    shown.replaceChildren(drawn);
    shown.classList.add("drawn");
  } catch {
    // It stays as it is written.
  }
}

/** The node of a tree [name, attributes, texts and trees...], of known names alone. */
export function mathml(tree) {
  const [name, attributes, ...children] = tree;
  if (!NAMES.has(name)) throw new Error(`${name} is no element of a formula`);
  const made = document.createElementNS(MATHML, name);
  for (const [key, value] of Object.entries(attributes)) {
    if (ATTRIBUTES.has(key)) made.setAttribute(key, String(value));
  }
  made.append(...children.map((child) => (typeof child === "string" ? child : mathml(child))));
  return made;
}
