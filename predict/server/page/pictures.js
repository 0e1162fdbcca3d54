// Pictures that go with a message: attached, pasted or dropped. They are data URLs in this tab.

import { byId, button, element } from "./dom.js";
import { words } from "./words.js";

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];
const MAX_BYTES = 20 << 20; // of a picture
const MAX_PICTURES = 16; // of a message

/** Whether a text is the data URL of a picture that servers take. */
export function isPicture(url) {
  return typeof url === "string" && KINDS.some((kind) => url.startsWith(`data:${kind};base64,`));
}

/** Pictures as elements. */
export function pictureRow(urls, beside = () => null) {
  const items = urls.map((url, index) =>
    element(
      "li",
      {},
      element("img", { src: url, alt: `${words("Picture")} ${index + 1}` }),
      beside(index),
    ),
  );
  return element("ul", { class: "pictures", "aria-label": words("Pictures") }, ...items);
}

/** The pictures of the message that is being written. */
export class Attachments {
  /** say: tells what was taken and what was not. changed: called after each change. */
  constructor(say, changed) {
    this.urls = [];
    this.say = say;
    this.changed = changed;
    this.box = byId("attached");
    const pick = byId("pick");
    byId("attach").addEventListener("click", () => pick.click());
    pick.addEventListener("change", async () => {
      await this.add(pick.files);
      pick.value = ""; // the same file may be chosen again
    });
    byId("text").addEventListener("paste", (event) => {
      const { files } = event.clipboardData;
      if (files.length === 0) return;
      event.preventDefault();
      this.add(files);
    });
    this.wireDrop();
  }

  wireDrop() {
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    document.addEventListener("dragover", (event) => {
      if (hasFiles(event) && document.querySelector("dialog[open]") === null) event.preventDefault();
    });
    document.addEventListener("drop", (event) => {
      if (!hasFiles(event) || document.querySelector("dialog[open]") !== null) return;
      event.preventDefault();
      this.add(event.dataTransfer.files);
    });
  }

  /** Takes files in order; what is no picture is named, and nothing else of it is taken. */
  async add(files) {
    const wrong = [];
    let count = 0;
    for (const file of [...files]) {
      if (!KINDS.includes(file.type)) wrong.push(`${file.name} is no PNG, JPEG, WebP, GIF or BMP.`);
      else if (file.size > MAX_BYTES) wrong.push(`${file.name} has more than 20 MiB.`);
      else if (this.urls.length >= MAX_PICTURES) wrong.push(`${file.name} is one too many.`);
      else {
        this.urls.push(await readAsUrl(file));
        count += 1;
      }
    }
    this.draw();
    const taken = count > 0 ? [`${count} ${count === 1 ? "picture" : "pictures"} attached.`] : [];
    this.say([...taken, ...wrong].join(" "), wrong.length > 0);
  }

  /** The pictures, which are no longer attached. */
  take() {
    const { urls } = this;
    this.urls = [];
    this.draw();
    return urls;
  }

  draw() {
    const remove = (index) =>
      button("Remove", () => this.remove(index), {
        "aria-label": `${words("Remove picture")} ${index + 1}`,
      });
    this.box.replaceChildren();
    if (this.urls.length > 0) this.box.append(pictureRow(this.urls, remove));
    this.changed();
  }

  remove(index) {
    this.urls.splice(index, 1);
    this.draw();
    byId("text").focus();
  }
}

function readAsUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}
