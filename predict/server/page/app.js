// The page: wires the conversation, the message box, the dialogs and the server together.

import { ServerError, chatEvents, formulaTree, listModels } from "./api.js";
import {
  answerTurn,
  applyEvent,
  exportText,
  importText,
  messagesOf,
  userTurn,
} from "./conversation.js";
import { button, byId, element } from "./dom.js";
import { FieldForm } from "./fields.js";
import { Follower } from "./follow.js";
import { Attachments } from "./pictures.js";
import { setFormulas } from "./formulas.js";
import { Settings, saveTheme, tab } from "./settings.js";
import { Watch, statsWords } from "./stats.js";
import { TurnView, isEnter } from "./turns.js";
import { changeLanguage, shownLanguage, translate, words } from "./words.js";

const MAX_SPOKEN = 1500; // characters of an answer that a screen reader is given at its end
const SUGGESTIONS = [
  "Explain continuous batching in three sentences.",
  "Write a Python function that merges two sorted lists.",
  "Make a table of the planets and how long their years are.",
];

class Page {
  constructor() {
    this.settings = new Settings();
    this.key = tab.key;
    this.system = "";
    this.turns = [];
    this.views = [];
    this.running = null; // { controller, ended } while an answer comes
    this.models = []; // of the server, adapters among them
    this.afterKey = null; // what is tried again with a key
    this.text = byId("text");
    this.follower = new Follower(byId("conversation"), byId("latest"));
    this.fields = new FieldForm(byId("fields"), this.settings);
  }

  start() {
    translate(document.body);
    setFormulas((latex, display) => formulaTree(latex, display, this.key));
    this.wireComposer();
    this.wireHeader();
    this.wireSettings();
    this.wireKey();
    this.restore();
    this.loadModels();
    this.text.focus();
  }

  // The message box

  wireComposer() {
    const tell = (words, isWrong) => (isWrong ? this.notify(words) : this.say(words));
    this.attachments = new Attachments(tell, () => this.follower.grown());
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.text.addEventListener("input", () => this.fit());
    this.text.addEventListener("keydown", (event) => {
      if (isEnter(event)) {
        event.preventDefault();
        this.send();
      } else if (event.key === "ArrowUp" && this.text.value === "") {
        const last = this.views.findLast((view) => view.turn.role === "user");
        if (last && !this.running) {
          event.preventDefault();
          last.edit();
        }
      }
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("latest").addEventListener("click", () => {
      this.follower.toEnd();
      this.text.focus();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && document.querySelector("dialog[open]") === null) this.stop();
    });
    for (const each of SUGGESTIONS.map(words)) {
      byId("suggestions").append(element("li", {}, button(each, () => this.propose(each))));
    }
  }

  propose(text) {
    this.text.value = text;
    this.fit();
    this.text.focus();
  }

  /** Makes the message box as high as its text. */
  fit() {
    this.text.style.height = "auto";
    this.text.style.height = `${this.text.scrollHeight}px`;
  }

  async send() {
    const content = this.text.value;
    const isEmpty = content.trim() === "" && this.attachments.urls.length === 0;
    if (isEmpty || this.running || !this.isReady()) return;
    const pictures = this.attachments.take();
    this.text.value = "";
    this.fit();
    this.notify("");
    this.add(userTurn(content, pictures));
    await this.answer();
  }

  /** Whether the settings can be sent; else shows the first that is wrong. */
  isReady() {
    const { wrong } = this.fields;
    if (wrong === null) return true;
    this.openSettings();
    wrong.focus();
    return false;
  }

  // Turns

  add(turn) {
    const view = new TurnView(turn, {
      edit: (text) => this.edit(view, text),
      regenerate: () => this.regenerate(view),
      remove: () => this.remove(view),
      enterKey: () => this.askKey(() => this.regenerate(view)),
    });
    this.turns.push(turn);
    this.views.push(view);
    byId("turns").append(view.element);
    this.changed();
    return view;
  }

  /** Takes away the turns from `at` on, or `count` of them. */
  cut(at, count = this.turns.length - at) {
    this.turns.splice(at, count);
    for (const view of this.views.splice(at, count)) view.element.remove();
    this.changed();
  }

  /** Shows other turns. */
  replace(system, turns) {
    this.cut(0);
    this.setSystem(system);
    for (const turn of turns) this.add(turn);
    this.follower.toEnd();
  }

  changed() {
    byId("welcome").hidden = this.turns.length > 0;
    if (!this.running) tab.conversation = this.turns.length > 0 || this.system ? this.file() : "";
  }

  file() {
    return exportText(this.system, this.turns);
  }

  restore() {
    try {
      const { system, turns } = importText(tab.conversation || '{"messages": []}');
      this.replace(system, turns);
    } catch {
      tab.conversation = ""; // of another version of this page
    }
  }

  async edit(view, text) {
    await this.stop();
    const at = this.views.indexOf(view);
    const undo = this.undo();
    view.turn.content = text;
    view.redraw();
    if (view.turn.role === "user" && this.isReady()) {
      await this.answerAt(at + 1, undo);
    } else {
      this.changed();
      this.text.focus();
    }
  }

  async regenerate(view) {
    await this.stop();
    if (!this.isReady()) return;
    const at = this.views.indexOf(view);
    if (at >= 0) await this.answerAt(at, this.undo());
  }

  /** Puts a new answer in the place of all turns from `at` on. */
  async answerAt(at, undo) {
    const numLost = this.turns.length - at - 1; // besides the answer that the new one replaces
    this.cut(at);
    this.notify(numLost > 0 ? "What followed is gone." : "", undo);
    await this.answer();
  }

  /** A way back to the conversation as it is now. */
  undo() {
    const { system } = this;
    const turns = this.turns.map((turn) => ({ ...turn }));
    return () => this.replace(system, turns);
  }

  async remove(view) {
    await this.stop();
    const at = this.views.indexOf(view);
    const undo = this.undo();
    const hasAnswer = view.turn.role === "user" && this.turns[at + 1]?.role === "assistant";
    this.cut(at, hasAnswer ? 2 : 1);
    this.notify("Deleted.", undo);
    this.text.focus();
  }

  async clear() {
    await this.stop();
    const undo = this.turns.length > 0 ? this.undo() : null;
    this.cut(0);
    this.notify(undo ? "A new chat." : "", undo);
    this.text.focus();
  }

  // Answers

  /** Asks for the next turn, and shows it as it comes. */
  async answer() {
    const request = {
      ...this.settings.request(),
      messages: messagesOf(this.system, this.turns),
      stream: true,
      stream_options: { include_usage: true },
    };
    const controller = new AbortController();
    let ended;
    const end = new Promise((resolve) => (ended = resolve));
    this.running = { controller, end };
    const view = this.add(answerTurn(this.settings.model));
    this.showRunning(true);
    this.follower.toEnd();
    view.follow(() => this.follower.grown());
    this.say("The model is answering.");
    try {
      await this.receive(view, request, controller.signal);
    } finally {
      this.running = null;
      this.showRunning(false);
      ended();
    }
    view.finish();
    this.changed();
    this.follower.grown();
    this.tell(view.turn);
    if (view.turn.error?.status === 401) this.askKey(() => this.regenerate(view));
  }

  async receive(view, request, signal) {
    const { turn } = view;
    const watch = new Watch();
    try {
      if (!request.model) {
        this.showModels(await listModels(this.key));
        request.model = this.settings.model;
      }
      for await (const event of chatEvents(request, this.key, signal)) {
        const size = turn.reasoning.length + turn.toolCalls.length;
        const text = applyEvent(turn, event);
        watch.note(event, text !== "" || turn.reasoning.length + turn.toolCalls.length > size);
        view.grow(text);
      }
    } catch (error) {
      if (error?.name === "AbortError") turn.finish = "stopped";
      else if (turn.finish === null || turn.finish === "error") turn.error = known(error);
    }
    if (!turn.error || turn.content) turn.stats = watch.stats();
  }

  /** Ends the answer that comes, and returns when it has ended. */
  async stop() {
    if (!this.running) return;
    const { controller, end } = this.running;
    controller.abort();
    await end;
  }

  showRunning(isRunning) {
    const hadFocus = [byId("stop"), byId("send")].includes(document.activeElement);
    byId("send").hidden = isRunning;
    byId("stop").hidden = !isRunning;
    if (hadFocus || document.activeElement === document.body) this.text.focus();
  }

  /** Gives an answer that has ended to screen readers, once. */
  tell(turn) {
    if (turn.error) return; // its box is an alert
    const text = turn.content.slice(0, MAX_SPOKEN);
    const rest = turn.content.length > MAX_SPOKEN ? " … The rest stands in the conversation." : "";
    this.say(`The model answered: ${text}${rest} ${statsWords(turn.stats)[0]}`);
  }

  say(said) {
    byId("live").textContent = words(said);
  }

  /** A line above the message box, with a way back where there is one. */
  notify(said, undo = null) {
    const line = byId("notice");
    line.replaceChildren();
    if (!said) return;
    const hide = () => {
      line.replaceChildren();
      this.text.focus();
    };
    const goBack = async () => {
      await this.stop();
      undo();
      hide();
    };
    const back = undo ? [button("Undo", goBack)] : [];
    line.append(element("span", {}, words(said)), ...back, button("Dismiss", hide));
  }

  // Head

  wireHeader() {
    byId("new").addEventListener("click", () => this.clear());
    byId("open-settings").addEventListener("click", () => this.openSettings());
    byId("model-name").addEventListener("click", () => {
      this.openSettings();
      byId("model").focus();
    });
    const system = matchMedia("(prefers-color-scheme: dark)");
    const isDark = () => {
      const { theme } = document.documentElement.dataset;
      return theme ? theme === "dark" : system.matches;
    };
    const show = () => byId("theme").setAttribute("aria-pressed", String(isDark()));
    byId("theme").addEventListener("click", () => {
      const theme = isDark() ? "light" : "dark";
      document.documentElement.dataset.theme = theme;
      saveTheme(theme);
      show();
    });
    system.addEventListener("change", show);
    show();
  }

  /** Asks the server for its models; returns whether it told them. */
  async loadModels() {
    try {
      this.showModels(await listModels(this.key));
      this.notify("");
      return true;
    } catch (error) {
      if (error.status === 401) this.askKey();
      else {
        this.notify([error.message, error.detail].filter(Boolean).join(" "));
        byId("notice").append(button("Try again", () => this.loadModels()));
      }
      return false;
    }
  }

  showModels(models) {
    const known = models.find(({ id }) => id === this.settings.model) ?? models[0];
    this.models = models;
    this.settings.model = known?.id ?? "";
    const bases = models.filter(({ parent }) => parent === null).map(({ id }) => id);
    byId("model").replaceChildren(...bases.map(option));
    byId("model").value = known?.parent ?? this.settings.model;
    this.showAdapters();
  }

  /** The adapters of the chosen model; a request names one in the model's place. */
  showAdapters() {
    const base = byId("model").value;
    const own = this.models.filter(({ parent }) => parent === base).map(({ id }) => id);
    byId("adapter").replaceChildren(
      element("option", { value: "" }, words("none, the model itself")),
      ...own.map(option),
    );
    byId("adapter").value = own.includes(this.settings.model) ? this.settings.model : "";
    byId("adapter-field").hidden = own.length === 0;
    this.showModel();
  }

  choose(model) {
    this.settings.model = model;
    this.settings.save();
  }

  showModel() {
    const { model } = this.settings;
    byId("model-name").textContent = model;
    byId("model-name").hidden = model === "";
  }

  // Settings

  wireSettings() {
    const dialog = byId("settings");
    dialog.querySelector("form").addEventListener("submit", (event) => {
      event.preventDefault();
      dialog.close();
    });
    closeFromOutside(dialog);
    byId("model").addEventListener("change", (event) => {
      this.choose(event.target.value);
      this.showAdapters();
    });
    byId("language").value = shownLanguage;
    byId("language").addEventListener("change", (event) => changeLanguage(event.target.value));
    byId("adapter").addEventListener("change", (event) => {
      this.choose(event.target.value || byId("model").value);
      this.showModel();
    });
    byId("system").addEventListener("input", (event) => {
      this.system = event.target.value;
      this.changed();
    });
    byId("reset").addEventListener("click", () => this.fields.reset());
    byId("export").addEventListener("click", () => this.export());
    byId("import").addEventListener("click", () => byId("file").click());
    byId("file").addEventListener("change", (event) => this.import(event.target));
    byId("enter-key").addEventListener("click", () => this.askKey());
    byId("forget-key").addEventListener("click", () => {
      this.setKey("");
      byId("enter-key").focus();
    });
    this.setKey(this.key);
  }

  openSettings() {
    byId("import-error").textContent = "";
    if (!byId("settings").open) byId("settings").showModal();
  }

  setSystem(system) {
    this.system = system;
    byId("system").value = system;
  }

  export() {
    const url = URL.createObjectURL(new Blob([this.file()], { type: "application/json" }));
    const time = new Date().toISOString().slice(0, 16).replaceAll(":", "");
    element("a", { href: url, download: `conversation-${time}.json` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  }

  async import(input) {
    const [file] = input.files;
    input.value = ""; // the same file may be chosen again
    if (!file) return;
    await this.stop();
    try {
      const { system, turns } = importText(await file.text());
      const undo = this.undo();
      this.replace(system, turns);
      byId("settings").close();
      this.notify(`${turns.length} messages from ${file.name}.`, undo);
      this.text.focus();
    } catch (error) {
      byId("import-error").textContent = error.message;
    }
  }

  // The API key

  wireKey() {
    const dialog = byId("key-dialog");
    dialog.querySelector("form").addEventListener("submit", async (event) => {
      event.preventDefault();
      const key = byId("key").value.trim();
      // What a header can hold.
      const isKey = /^[\x21-\x7e]{1,4096}$/.test(key);
      byId("key-error").textContent = isKey
        ? ""
        : words("A key is made of letters, digits and signs, without spaces.");
      if (!isKey) return;
      const then = this.afterKey;
      this.setKey(key);
      dialog.close();
      if (await this.loadModels()) then();
    });
    byId("close-key").addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => {
      byId("key").value = "";
      this.afterKey = null;
    });
    closeFromOutside(dialog);
  }

  /** Asks for the key, and then does what needs it. */
  askKey(then = () => {}) {
    this.afterKey = then;
    const isWrong = this.key !== "";
    byId("key-words").textContent = words(
      isWrong
        ? "The server did not take the key that this tab has. Another stays until you close the tab."
        : "This server asks for a key. It stays in this tab until you close it.",
    );
    byId("key-error").textContent = "";
    if (!byId("key-dialog").open) byId("key-dialog").showModal();
    byId("key").focus();
  }

  setKey(key) {
    this.key = key;
    tab.key = key;
    byId("key-state").textContent = words(
      key ? "This tab has a key. It is gone when you close the tab." : "This tab has none.",
    );
    byId("forget-key").disabled = key === "";
  }
}

const option = (id) => element("option", { value: id }, id);

/** The error of a turn: a ServerError as it is, else what is wrong with the page itself. */
function known(error) {
  if (error instanceof ServerError) return error;
  return new ServerError("The page could not read the answer.", {
    detail: String(error?.message ?? error),
  });
}

/** Closes a dialog by a click beside it. */
function closeFromOutside(dialog) {
  dialog.addEventListener("pointerdown", (event) => {
    const box = dialog.getBoundingClientRect();
    const isInside =
      event.clientX >= box.left &&
      event.clientX <= box.right &&
      event.clientY >= box.top &&
      event.clientY <= box.bottom;
    if (event.target === dialog && !isInside) dialog.close();
  });
}

new Page().start();
