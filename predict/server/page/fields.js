// The form of the settings that say how the model samples.

import { byId, element } from "./dom.js";
import { FIELDS, valueOf } from "./settings.js";
import { words } from "./words.js";

/** Rows for all fields, which keep what is written in the settings. */
export class FieldForm {
  constructor(parent, settings) {
    this.settings = settings;
    parent.append(...FIELDS.map((field) => this.row(field)));
  }

  /** The first input whose value is wrong, or null. */
  get wrong() {
    const wrong = FIELDS.find((field) => this.check(field) !== "");
    return wrong ? byId(`set-${wrong.key}`) : null;
  }

  /** Empties all fields. */
  reset() {
    for (const field of FIELDS) {
      byId(`set-${field.key}`).value = "";
      delete this.settings.texts[field.key];
      this.check(field);
    }
    this.settings.save();
  }

  row(field) {
    const id = `set-${field.key}`;
    const isText = field.kind === "lines";
    const input = element(isText ? "textarea" : "input", {
      id,
      ...(isText
        ? { rows: 2, spellcheck: "false" }
        : { inputmode: "decimal", placeholder: words("default") }),
      autocomplete: "off",
      "aria-describedby": `${id}-hint ${id}-error`,
    });
    input.value = this.settings.texts[field.key] ?? "";
    input.addEventListener("input", () => {
      this.settings.texts[field.key] = input.value;
      if (this.check(field) === "") this.settings.save();
    });
    return element(
      "div",
      { class: isText ? "field wide" : "field" },
      element("label", { for: id }, words(field.label)),
      input,
      element("p", { class: "hint", id: `${id}-hint` }, words(field.hint)),
      element("p", { class: "wrong", id: `${id}-error`, role: "alert" }),
    );
  }

  /** What is wrong with a field, which the form shows; "" when it is right. */
  check(field) {
    let wrong = "";
    try {
      valueOf(field, this.settings.texts[field.key] ?? "");
    } catch (error) {
      wrong = error.message;
    }
    const id = `set-${field.key}`;
    byId(id).setAttribute("aria-invalid", String(wrong !== ""));
    if (byId(`${id}-error`).textContent !== wrong) byId(`${id}-error`).textContent = wrong;
    return wrong;
  }
}
