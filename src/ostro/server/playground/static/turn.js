// One turn of a conversation on the page: its content and its actions.

import { Answer, partsOfTurn } from "./answer.js";
import { ResultsView, resultsForm } from "./calls.js";
import { copied } from "./clipboard.js";
import { announce, make } from "./dom.js";
import { isContinuable, sentenceOf } from "./endings.js";
import { fileView } from "./file-view.js";
import { submitByKeys } from "./keys.js";

const TITLES = { user: "You", assistant: "Answer", tool: "Result" };

export class TurnView {
  #body;
  #copies = action("Copy", () => this.#copy());
  #edits = action("Edit", () => this.#edit(), "changes");
  #versions = make("span", { class: "versions", hidden: true });
  #ended = make("p", { class: "ended", hidden: true });
  #continues = action("Continue", () => this.acts.proceed(this.turn), "changes");

  /** `acts` are edit(turn, changes), regenerate(turn), proceed(turn), step(turn, by), callsBefore(turn) and
   *  complain(sentence). */
  constructor(turn, acts) {
    this.turn = turn;
    this.acts = acts;
    this.#body = this.#bodyOf(turn);
    this.model = make("span", { class: "by", hidden: true }, turn.model ?? "");
    this.actions = make(
      "p",
      { class: "actions", hidden: true },
      this.#versions,
      this.#copies,
      this.#edits,
      this.#continues,
      action("Regenerate", () => acts.regenerate(turn), "changes"),
      this.model,
    );
    const title = make("h3", { class: "unseen" }, TITLES[turn.role]);
    this.node = make("li", { class: turn.role }, title, this.#body.node, this.#ended, this.actions);
  }

  /** Shows what has arrived so far. */
  grow() {
    this.node.classList.add("coming");
    this.#ended.hidden = this.actions.hidden = true;
    this.#body.update(this.turn);
  }

  /** Shows the complete turn with its actions. */
  finish() {
    this.node.classList.remove("coming");
    this.#body.finish(this.turn);
    this.#copies.hidden = !this.#text;
    // A turn that consists only of calls has no text to edit.
    this.#edits.hidden = Boolean(this.turn.tool_calls) && !this.turn.content;
    this.#ended.textContent = sentenceOf(this.turn);
    this.#ended.hidden = !this.#ended.textContent;
    this.actions.hidden = false;
  }

  /** Offers to continue an answer that ended early, if nothing follows it. */
  offerMore(isLast) {
    this.#continues.hidden = !isLast || !isContinuable(this.turn);
  }

  /** The turn's version number, and buttons for the other versions. */
  count(index, all) {
    this.#versions.hidden = all < 2;
    if (all < 2) return;
    const back = action("‹", () => this.acts.step(this.turn, -1), "changes", "Previous version");
    const on = action("›", () => this.acts.step(this.turn, +1), "changes", "Next version");
    // Not disabled at the ends: that would lose the focus.
    back.setAttribute("aria-disabled", String(index === 0));
    on.setAttribute("aria-disabled", String(index === all - 1));
    const name = `Version ${index + 1} of ${all}`;
    const told = make("span", { class: "number", role: "img", "aria-label": name }, `${index + 1}/${all}`);
    this.#versions.replaceChildren(back, told, on);
  }

  focusStep(by) {
    this.#versions.querySelector(by < 0 ? "button" : "button:last-child")?.focus();
  }

  #bodyOf(turn) {
    if (turn.role === "user") return new Said();
    return turn.role === "tool" ? new ResultsView(this.acts.callsBefore(turn)) : new Answer();
  }

  /** The text to copy: an answer without its reasoning and its calls. */
  get #text() {
    const { role, content, results } = this.turn;
    if (role === "tool") return results.map((result) => result.content).join("\n");
    return role === "user" ? content : partsOfTurn(this.turn).said;
  }

  async #copy() {
    if (await copied(this.#text)) announce("Copied.");
    else this.acts.complain("The browser does not let this page copy. Select the text and copy it with the keyboard.");
  }

  #edit() {
    const close = () => {
      editor.replaceWith(this.#body.node);
      this.actions.hidden = false;
      this.#edits.focus();
    };
    const editor = this.#editorWith((changes) => (close(), this.acts.edit(this.turn, changes)), close);
    this.#body.node.replaceWith(editor);
    this.actions.hidden = true;
    const field = editor.querySelector("textarea");
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  }

  /** Replaces the turn with a form; calls `done` with the changes, or `cancel` if there are none. */
  #editorWith(done, cancel) {
    const { role, content, files, results } = this.turn;
    if (role === "tool") return resultsForm(this.acts.callsBefore(this.turn), { results, send: (given) => done({ results: given }), cancel });
    return textForm(role, content, { send: (text) => done({ content: text }), cancel, mayBeEmpty: Boolean(files) });
  }
}

/** A user's text is shown as written, below its files. */
class Said {
  #text = make("div", { class: "prose said" });
  node = make("div", { class: "message" }, this.#text);

  finish({ content, files = [] }) {
    this.#text.textContent = content;
    this.#text.hidden = !content;
    this.node.replaceChildren(...files.map(fileView), this.#text);
  }
}

function textForm(role, text, { send, cancel, mayBeEmpty }) {
  const label = role === "user" ? "Edit the message" : "Edit the answer";
  const field = make("textarea", { value: text, rows: 3, "aria-label": label, "data-enter": "send" });
  const save = make("button", { type: "submit", class: "go" }, role === "user" ? "Send" : "Save");
  const form = make("form", { class: "editor" }, field, make("div", { class: "bar" }, action("Cancel", cancel), save));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (field.value.trim() || mayBeEmpty) send(field.value);
  });
  submitByKeys(form, { cancel });
  return form;
}

function action(label, act, kind = "", name = "") {
  const button = make("button", { type: "button", class: `quiet ${kind}` }, label);
  if (name) button.setAttribute("aria-label", name);
  button.addEventListener("click", act);
  return button;
}
