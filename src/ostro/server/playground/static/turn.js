// One turn of a conversation on the page: what was said, and what can be done about it.

import { Answer, partsOf } from "./answer.js";
import { copied } from "./clipboard.js";
import { announce, make } from "./dom.js";
import { isComposing, sends } from "./keys.js";

export class TurnView {
  #body;
  #versions = make("span", { class: "versions", hidden: true });

  /** `acts` are edit(turn, text), regenerate(turn), step(turn, by) and complain(sentence). */
  constructor(turn, acts) {
    this.turn = turn;
    this.acts = acts;
    this.#body = turn.role === "user" ? new Said() : new Answer();
    this.model = make("span", { class: "by", hidden: true }, turn.model ?? "");
    this.actions = make(
      "p",
      { class: "actions", hidden: true },
      this.#versions,
      action("Copy", () => this.#copy()),
      action("Edit", () => this.#edit(), "changes"),
      action("Regenerate", () => acts.regenerate(turn), "changes"),
      this.model,
    );
    const title = make("h3", { class: "unseen" }, turn.role === "user" ? "You" : "Answer");
    this.node = make("li", { class: turn.role }, title, this.#body.node, this.actions);
  }

  /** Shows what has come of it so far. */
  grow() {
    this.node.classList.add("coming");
    this.#body.update(this.turn.content);
  }

  /** Shows it whole, with what can be done about it. */
  finish() {
    this.node.classList.remove("coming");
    this.#body.finish(this.turn.content);
    this.actions.hidden = false;
  }

  /** Which version of the turn it is, of how many. */
  count(index, all) {
    this.#versions.hidden = all < 2;
    if (all < 2) return;
    const back = action("‹", () => this.acts.step(this.turn, -1), "changes", "Previous version");
    const on = action("›", () => this.acts.step(this.turn, +1), "changes", "Next version");
    // Not disabled at the ends: that would take the focus away.
    back.setAttribute("aria-disabled", String(index === 0));
    on.setAttribute("aria-disabled", String(index === all - 1));
    const name = `Version ${index + 1} of ${all}`;
    const told = make("span", { class: "number", role: "img", "aria-label": name }, `${index + 1}/${all}`);
    this.#versions.replaceChildren(back, told, on);
  }

  focusStep(by) {
    this.#versions.querySelector(by < 0 ? "button" : "button:last-child")?.focus();
  }

  async #copy() {
    const text = this.turn.role === "user" ? this.turn.content : partsOf(this.turn.content).said;
    if (await copied(text)) announce("Copied.");
    else this.acts.complain("The browser does not let this page copy. Select the text and copy it with the keyboard.");
  }

  #edit() {
    const editor = editorOf(this.turn, (text) => {
      editor.replaceWith(this.#body.node);
      this.actions.hidden = false;
      this.actions.querySelector(".changes:not(.versions *)").focus();
      if (text !== null) this.acts.edit(this.turn, text);
    });
    this.#body.node.replaceWith(editor);
    this.actions.hidden = true;
    const field = editor.querySelector("textarea");
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  }
}

/** What a user said is shown as it was written. */
class Said {
  node = make("div", { class: "prose said" });

  finish(text) {
    this.node.textContent = text;
  }
}

/** A form in a turn's place; `done` is called with the text, or with null if nothing shall change. */
function editorOf(turn, done) {
  const label = turn.role === "user" ? "Edit the message" : "Edit the answer";
  const field = make("textarea", { value: turn.content, rows: 3, "aria-label": label, "data-enter": "send" });
  const save = make("button", { type: "submit", class: "go" }, turn.role === "user" ? "Send" : "Save");
  const form = make("form", { class: "editor" }, field, make("div", { class: "bar" }, action("Cancel", () => done(null)), save));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (field.value.trim()) done(field.value);
  });
  form.addEventListener("keydown", (event) => {
    if (isComposing(event)) return;
    if (event.key === "Escape") done(null);
    else if (sends(event)) form.requestSubmit();
    else return;
    event.preventDefault();
    // Neither stops an answer nor sends the message below.
    event.stopPropagation();
  });
  return form;
}

function action(label, act, kind = "", name = "") {
  const button = make("button", { type: "button", class: `quiet ${kind}` }, label);
  if (name) button.setAttribute("aria-label", name);
  button.addEventListener("click", act);
  return button;
}
