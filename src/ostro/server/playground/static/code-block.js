// A code block: its language, a copy button, and coloured tokens. highlight.js classifies the tokens; nodes are made
// here, from text.

import { copied } from "./clipboard.js";
import { announce, make } from "./dom.js";
import hljs from "./vendor/highlight.min.js";

// Colouring takes time proportional to the length; longer blocks would stutter while they grow.
const MOST_COLOURED = 20_000;
const COPIED_MS = 2000;

/** A node that shows growing code. */
export class CodeBlock {
  /** `title` stands above the code, and `label` is its name for screen readers. */
  constructor(language, { title = language, label = language ? `Code, ${language}` : "Code" } = {}) {
    this.language = language;
    this.code = make("code");
    const copy = make("button", { type: "button", class: "quiet" }, "Copy");
    copy.addEventListener("click", () => this.#copy(copy));
    this.node = make(
      "figure",
      { class: "code" },
      make("figcaption", {}, make("span", {}, title), copy),
      make("pre", { tabIndex: 0, role: "group", "aria-label": label }, this.code),
    );
  }

  update(text) {
    this.code.replaceChildren(coloured(text, this.language) ?? text);
  }

  async #copy(button) {
    if (!(await copied(this.code.textContent))) {
      getSelection().selectAllChildren(this.code);
      announce("Selected: copy it with the keyboard.");
      return;
    }
    announce("Copied.");
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), COPIED_MS);
  }
}

/** Nodes for the code's tokens, or null if the language is unknown. */
function coloured(text, language) {
  if (text.length > MOST_COLOURED || !hljs.getLanguage(language)) return null;
  const result = hljs.highlight(text, { language, ignoreIllegals: true });
  const nodes = nodeOf(result._emitter.root);
  // A bug in a grammar must not change the text.
  return nodes.textContent === text ? nodes : null;
}

function nodeOf({ scope, children }) {
  const name = scope?.split(".")[0];
  const node = name ? make("span", { class: `hl-${name}` }) : document.createDocumentFragment();
  node.append(...children.map((child) => (typeof child === "string" ? child : nodeOf(child))));
  return node;
}
