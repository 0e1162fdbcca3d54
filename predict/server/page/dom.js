import { words } from "./words.js";

/**
 * A new element. The only way in which this page makes elements: never from HTML text.
 * @param {string} name
 * @param {{on?: Record<string, (event: Event) => void>} & Record<string, unknown>} attributes
 *   the page's own; `on` holds listeners, true is an empty attribute, false and null are left out
 * @param {...(Node|string|null)} children strings become text, null is left out
 * @returns {HTMLElement}
 */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "on") {
      for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
    } else if (value !== false && value !== null && value !== undefined) {
      made.setAttribute(key, value === true ? "" : String(value));
    }
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** The element of index.html with this id. */
export function byId(id) {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`the page has no #${id}`);
  return found;
}

/** A small button of words. */
export function button(said, listener, attributes = {}) {
  const named = { ...attributes };
  for (const name of ["aria-label", "title"]) if (named[name]) named[name] = words(named[name]);
  return element("button", { type: "button", ...named, on: { click: listener } }, words(said));
}

/**
 * Puts a text on the clipboard; returns whether it went.
 * Browsers keep navigator.clipboard from pages that come over plain HTTP from another host.
 */
export async function copyText(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // Not allowed: the older way may be.
    }
  }
  const focused = document.activeElement;
  const area = element("textarea", { class: "unseen", readonly: true });
  area.value = text;
  // Beside the button: outside of an open dialog nothing can be selected.
  (focused?.closest("dialog") ?? document.body).append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  focused?.focus({ preventScroll: true });
  return copied;
}

/** A button that copies what `text()` gives, and says so for a moment. */
export function copyButton(text, label = "Copy") {
  const made = button("Copy", async () => {
    made.textContent = words((await copyText(text())) ? "Copied" : "Not allowed");
    setTimeout(() => (made.textContent = words("Copy")), 1600);
  });
  made.setAttribute("aria-label", words(label));
  return made;
}
