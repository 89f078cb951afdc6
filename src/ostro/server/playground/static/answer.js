// A model's answer: reasoning is collapsed, the text is Markdown or JSON, and tool calls come last.

import { CallView } from "./calls.js";
import { CodeBlock } from "./code-block.js";
import { make, seconds } from "./dom.js";
import { indented, isJson } from "./json-text.js";
import { Markdown } from "./markdown.js";

const BEGIN = "<think>";
const END = "</think>";

/** Splits a text into {thought, said, thinking}: `thought` may be null, `thinking` says whether it continues. */
export function partsOf(text) {
  const start = text.trimStart();
  // Some templates open the reasoning themselves, so that the answer only has its end tag, on a line of its own.
  const end = start.startsWith(BEGIN) ? start.indexOf(END) : start.search(/^<\/think>\s*$/m);
  if (start.startsWith(BEGIN) && end < 0) return { thought: start.slice(BEGIN.length), said: "", thinking: true };
  if (end >= 0) {
    const thought = start.slice(0, end).replace(BEGIN, "");
    return { thought, said: start.slice(end + END.length).trimStart(), thinking: false };
  }
  // Hide a tag that has only partly arrived.
  return { thought: null, said: start && BEGIN.startsWith(start) ? "" : text, thinking: false };
}

/** The same for a turn, whose reasoning is separate if the server can separate it. */
export function partsOfTurn({ content, reasoning_content: thought, tool_calls: calls }) {
  return thought ? { thought, said: content, thinking: !content && !calls } : partsOf(content);
}

/** A node that shows a growing answer. */
export class Answer {
  #thought = null;
  #said = null;
  #calls = [];

  constructor() {
    this.node = make("div", { class: "prose" });
  }

  update(turn) {
    this.#show(turn, partsOfTurn(turn), "update");
  }

  /** Shows the complete answer. */
  finish(turn) {
    this.#show(turn, { ...partsOfTurn(turn), thinking: false }, "finish");
  }

  #show(turn, { thought, said, thinking }, how) {
    // What looked like the answer may turn out to be reasoning.
    if ((thought !== null) !== (this.#thought !== null)) this.#begin(thought !== null);
    this.#thought?.show(thought, { thinking, took: turn.thought_ms }, how);
    if (said) this.#say(said, how);
    for (const [index, call] of (turn.tool_calls ?? []).entries()) {
      if (!this.#calls[index]) this.node.append((this.#calls[index] = new CallView(call)).node);
      this.#calls[index].update(call);
    }
  }

  #say(said, how) {
    const Kind = isJson(said) ? JsonText : Markdown;
    if (!(this.#said instanceof Kind)) {
      this.#said?.node.remove();
      this.#said = new Kind();
      this.node.insertBefore(this.#said.node, this.#calls[0]?.node ?? null);
    }
    this.#said[how](said);
  }

  #begin(withThought) {
    this.#thought = withThought ? new Thought() : null;
    this.#said = null;
    this.#calls = [];
    this.node.replaceChildren(...(withThought ? [this.#thought.node] : []));
  }
}

/** An answer that is JSON. */
class JsonText {
  #block = new CodeBlock("json");
  node = this.#block.node;

  update(text) {
    this.#block.update(indented(text));
  }

  finish(text) {
    this.update(text);
  }
}

class Thought {
  #markdown = new Markdown();
  #title = make("summary");

  constructor() {
    this.node = make("details", { class: "thought" }, this.#title, this.#markdown.node);
  }

  /** `took` is the duration of the reasoning in milliseconds, if known. */
  show(text, { thinking, took }, how) {
    const over = took === undefined ? "Thoughts" : `Thought for ${took < 1000 ? "less than a second" : seconds(took)}`;
    this.#title.textContent = thinking ? "Thinking…" : over;
    this.node.classList.toggle("thinking", thinking);
    this.#markdown[how](text);
  }
}
