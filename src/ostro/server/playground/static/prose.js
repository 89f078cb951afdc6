// A model's text as nodes: paragraphs as they are, code in blocks, `code` and **weight** within a line. Nothing else is
// interpreted, and nothing is ever parsed as HTML.

import { make } from "./dom.js";

const FENCE = /^ {0,3}(```|~~~)([^\n`]*)$/;
const INLINE = /(`[^`\n]+`|\*\*[^*\n]+\*\*)/;

/** Blocks of a text, in order: {kind: "text" | "code", text, language}. A block of code may still be open at the end. */
export function blocksOf(text) {
  const blocks = [];
  let lines = [];
  let open = null;
  const close = (kind) => {
    if (lines.length || kind === "code") blocks.push({ kind, text: lines.join("\n"), language: open?.language ?? "" });
    lines = [];
  };
  for (const line of text.split("\n")) {
    const fence = FENCE.exec(line);
    if (!open && fence) {
      close("text");
      open = { mark: fence[1], language: fence[2].trim() };
    } else if (open && fence && fence[1] === open.mark && !fence[2].trim()) {
      close("code");
      open = null;
    } else if (open || line.trim()) {
      lines.push(line);
    } else {
      close("text");
    }
  }
  close(open ? "code" : "text");
  return blocks;
}

/** A node that shows a growing text; what stands already is left alone. */
export class Prose {
  #shown = [];

  constructor() {
    this.node = make("div", { class: "prose" });
  }

  update(text) {
    const blocks = blocksOf(text);
    blocks.forEach((block, index) => {
      const shown = this.#shown[index];
      if (shown && shown.kind === block.kind && shown.text === block.text) return;
      if (shown?.kind === block.kind) fill(shown.node, block);
      else {
        for (const stale of this.#shown.splice(index)) stale.node.remove();
        const node = fill(empty(block), block);
        this.node.append(node);
        this.#shown.push({ node });
      }
      Object.assign(this.#shown[index], { kind: block.kind, text: block.text });
    });
    for (const stale of this.#shown.splice(blocks.length)) stale.node.remove();
  }
}

function empty(block) {
  if (block.kind === "text") return make("p");
  return make("pre", { tabIndex: 0, role: "region" }, make("code"));
}

function fill(node, block) {
  if (block.kind === "code") {
    node.setAttribute("aria-label", block.language ? `Code, ${block.language}` : "Code");
    node.firstChild.textContent = block.text;
  } else {
    node.replaceChildren(...inline(block.text));
  }
  return node;
}

function inline(text) {
  return text.split(INLINE).map((part, index) => {
    if (index % 2 === 0) return part;
    return part.startsWith("`") ? make("code", {}, part.slice(1, -1)) : make("strong", {}, part.slice(2, -2));
  });
}
