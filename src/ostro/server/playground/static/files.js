// The files of the message that is being written: dropped on the chat or chosen, counted by the server, removable.

import { ApiError, askJson } from "./api.js";
import { announce, byId, make } from "./dom.js";
import { currentModel } from "./models.js";
import { factsOf, readTextFile, refusal } from "./text-file.js";

// The request's field that holds a file's text.
const FIELD = "prompt";

/** `panel` is where files can be dropped; `complain` shows a sentence. */
export class Files {
  #files = [];
  #list = byId("chat-files");

  constructor(panel, { complain }) {
    this.complain = complain;
    const chooser = byId("chat-file");
    panel.querySelector("[data-act=attach]").addEventListener("click", () => chooser.click());
    chooser.addEventListener("change", async () => {
      await this.add([...chooser.files]);
      // Allow the same file to be chosen again.
      chooser.value = "";
    });
    this.#takeDrops(panel);
  }

  /** Those that would be sent now. */
  get current() {
    return this.#files.map(({ name, size, text, tokens }) => ({ name, size, text, ...(tokens !== undefined && { tokens }) }));
  }

  /** Empties the list; returns what it held. */
  take() {
    const taken = this.current;
    this.#files = [];
    this.#show();
    return taken;
  }

  /** Puts back what was taken. */
  put(files) {
    this.#files = [...files.map((file) => ({ ...file, isCounted: true })), ...this.#files];
    this.#show();
  }

  async add(chosen) {
    this.complain("");
    const flaws = [];
    for (const each of chosen) await this.#addOne(each).catch((error) => flaws.push(error.message));
    if (flaws.length) this.complain(flaws.join(" "));
  }

  async #addOne(chosen) {
    const file = { ...(await readTextFile(chosen)), isCounted: false };
    this.#files.push(file);
    this.#show();
    const model = currentModel();
    try {
      const body = { model, [FIELD]: file.text, add_special_tokens: false };
      const { count, max_model_len: most } = await askJson("/tokenize", { method: "POST", body });
      file.tokens = count;
      const total = this.#files.reduce((sum, each) => sum + (each.tokens ?? 0), 0);
      if (most && total >= most) throw new ApiError(tooLong(count, total, { model, most }), { param: FIELD });
      announce(`Added: ${file.name}, ${factsOf(file)}.`);
    } catch (error) {
      // Where the server refuses or fails for another reason, the file stays, uncounted.
      if (error.param !== FIELD) throw error;
      this.#remove(file);
      throw new Error(refusal(file, error.message.replace(/\.$/, "")));
    } finally {
      file.isCounted = true;
      this.#show();
    }
  }

  #remove(file) {
    this.#files = this.#files.filter((each) => each !== file);
    this.#show();
  }

  #show() {
    this.#list.hidden = !this.#files.length;
    this.#list.replaceChildren(...this.#files.map((file) => this.#rowOf(file)));
  }

  #rowOf(file) {
    const remove = make("button", { type: "button", class: "quiet", "aria-label": `Remove ${file.name}` }, "✕");
    remove.addEventListener("click", () => {
      this.#remove(file);
      byId("chat-input").focus();
    });
    return make("li", {}, make("b", {}, file.name), make("span", {}, file.isCounted ? factsOf(file) : `${factsOf(file)}, counting…`), remove);
  }

  #takeDrops(panel) {
    const hasFiles = ({ dataTransfer }) => dataTransfer?.types.includes("Files");
    const mark = (isOver) => panel.classList.toggle("dropping", isOver);
    panel.addEventListener("dragover", (event) => {
      if (!hasFiles(event)) return;
      // Otherwise the browser opens the file in place of the page.
      event.preventDefault();
      event.dataTransfer.dropEffect = "copy";
      mark(true);
    });
    panel.addEventListener("dragleave", ({ relatedTarget }) => panel.contains(relatedTarget) || mark(false));
    panel.addEventListener("drop", (event) => {
      mark(false);
      if (!hasFiles(event)) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
  }
}

function tooLong(count, total, { model, most }) {
  const tokens = (number) => `${number.toLocaleString("en")} tokens`;
  const all = total > count ? `with the other files it makes ${tokens(total)}` : `it has ${tokens(count)}`;
  return `${all}, and the context of ${model} ends at ${tokens(most)}`;
}
