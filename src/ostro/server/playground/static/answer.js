// A model's answer: what it thought is folded away, what it says is Markdown.

import { make } from "./dom.js";
import { Markdown } from "./markdown.js";

const BEGIN = "<think>";
const END = "</think>";

/** {thought, said, thinking} of a text; `thought` is null where there is none, `thinking` whether it still goes on. */
export function partsOf(text) {
  const start = text.trimStart();
  // Some templates open the thought themselves, so that only its end is in the answer, on a line of its own.
  const end = start.startsWith(BEGIN) ? start.indexOf(END) : start.search(/^<\/think>\s*$/m);
  if (start.startsWith(BEGIN) && end < 0) return { thought: start.slice(BEGIN.length), said: "", thinking: true };
  if (end >= 0) {
    const thought = start.slice(0, end).replace(BEGIN, "");
    return { thought, said: start.slice(end + END.length).trimStart(), thinking: false };
  }
  // Nobody should see half a tag.
  return { thought: null, said: start && BEGIN.startsWith(start) ? "" : text, thinking: false };
}

/** A node that shows a growing answer. */
export class Answer {
  #thought = null;
  #said = new Markdown();

  constructor() {
    this.node = make("div", { class: "prose" });
  }

  update(text) {
    this.#show(partsOf(text), "update");
  }

  /** Shows the whole text; no more will come. */
  finish(text) {
    this.#show({ ...partsOf(text), thinking: false }, "finish");
  }

  #show({ thought, said, thinking }, how) {
    // What was taken for the answer may turn out to be the thought before it.
    if ((thought !== null) !== (this.#thought !== null)) this.#begin(thought !== null);
    this.#thought?.show(thought, thinking, how);
    if (!said) return;
    if (!this.#said.node.parentNode) this.node.append(this.#said.node);
    this.#said[how](said);
  }

  #begin(withThought) {
    this.#thought = withThought ? new Thought() : null;
    this.#said = new Markdown();
    this.node.replaceChildren(...(withThought ? [this.#thought.node] : []));
  }
}

class Thought {
  #markdown = new Markdown();
  #title = make("summary");

  constructor() {
    this.node = make("details", { class: "thought" }, this.#title, this.#markdown.node);
  }

  show(text, thinking, how) {
    this.#title.textContent = thinking ? "Thinking…" : "Thoughts";
    this.node.classList.toggle("thinking", thinking);
    this.#markdown[how](text);
  }
}
