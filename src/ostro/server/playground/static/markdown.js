// Markdown as nodes. marked splits a text into tokens, and elements and text nodes are made from them here, so that a
// model's output is never parsed as HTML. Unknown kinds of tokens are shown as source text.

import { CodeBlock } from "./code-block.js";
import { make } from "./dom.js";
import { formula } from "./formula.js";
import { tokensWithFormulas } from "./formula-syntax.js";

// Headings of an answer are below the page's own.
const HEADINGS_ABOVE = 3;
// Degenerate output may nest quotes and lists without end.
const DEEPEST = 16;
const LINKED = ["http:", "https:", "mailto:"];
const isSeen = ({ type }) => type !== "space" && type !== "def";

/** Shows a growing text. Complete blocks are neither parsed nor drawn again while more arrives. */
export class Markdown {
  #settled = { length: 0, blocks: 0, isOpen: false };
  #isOpen = false;

  constructor() {
    this.node = make("div", { class: "markdown" });
    this.flow = new Flow(this.node);
  }

  /** `text` starts with the previous text. */
  update(text) {
    const rest = text.slice(this.#settled.length);
    const tokens = tokensOf(rest, { growing: true });
    this.#isOpen = tokens.isOpen;
    this.flow.update(tokens, this.#settled.blocks);
    // Once its first line is complete, a block no longer merges with those before it.
    const last = tokens.findLastIndex(isSeen);
    if (last < 1 || !tokens[last].raw.includes("\n")) return;
    const settled = tokens.slice(0, last);
    const length = settled.reduce((sum, token) => sum + token.raw.length, 0);
    if (!rest.startsWith(tokens[last].raw, length)) return;
    this.#settled.length += length;
    this.#settled.blocks += settled.filter(isSeen).length;
    this.#settled.isOpen ||= tokens.isOpen;
  }

  /** Shows the complete text: only now are reference links known, whose addresses are elsewhere in the text, and what
   *  looked like the beginning of a formula. */
  finish(text) {
    const tokens = tokensOf(text, { growing: false });
    if (Object.keys(tokens.links).length || this.#isOpen || this.#settled.isOpen) this.flow.clear();
    this.flow.update(tokens, 0);
  }
}

function tokensOf(text, { growing }) {
  try {
    return tokensWithFormulas(text, { growing });
  } catch {
    // Nested too deeply for its recursion.
    return Object.assign([{ type: "unread", raw: text }], { links: {}, isOpen: false });
  }
}

/** The nodes of consecutive tokens, as children of one element; unchanged nodes are left alone. */
class Flow {
  #shown = [];

  constructor(node, depth = 0) {
    this.node = node;
    this.depth = depth;
  }

  clear() {
    this.#shown = [];
    this.node.replaceChildren();
  }

  /** `tokens` replace all blocks from index `from` on. */
  update(tokens, from = 0) {
    const seen = tokens.filter(isSeen);
    seen.forEach((token, index) => this.#put(token, from + index));
    for (const stale of this.#shown.splice(from + seen.length)) stale.block.node.remove();
  }

  #put(token, index) {
    const shown = this.#shown[index];
    const key = `${token.type} ${token.loose ?? ""} ${token.raw}`;
    if (shown?.key === key) return;
    if (shown?.type === token.type && shown.block.takes(token)) shown.block.update(token);
    else {
      const block = blockOf(token, this.depth);
      if (shown) shown.block.node.replaceWith(block.node);
      else this.node.append(block.node);
      this.#shown[index] = { type: token.type, block };
    }
    this.#shown[index].key = key;
  }
}

/** The block for a token: {node, takes, update}; `takes` says whether `update` can show another token instead. */
function blockOf(token, depth) {
  const build = depth < DEEPEST ? BLOCKS[token.type] : null;
  const block = (build ?? verbatim)(token, depth);
  block.update(token);
  return block;
}

const always = () => true;

const BLOCKS = {
  paragraph: () => lines("p"),
  // An item of a tight list.
  text: () => lines("span"),
  heading: ({ depth }) => ({ ...lines(`h${Math.min(depth + HEADINGS_ABOVE, 6)}`), takes: (token) => token.depth === depth }),
  hr: () => ({ node: make("hr"), takes: always, update() {} }),
  checkbox: ({ checked }) => ({ node: checkbox(checked), takes: () => false, update() {} }),
  blockquote: (_, depth) => nested(make("blockquote"), depth, (token) => token.tokens),
  list: ({ ordered, start }, depth) => ({
    ...nested(ordered ? make("ol", { start }) : make("ul"), depth, (token) => token.items),
    takes: (token) => token.ordered === ordered && token.start === start,
  }),
  list_item: ({ loose }, depth) => ({
    ...nested(make("li"), depth, (token) => token.tokens),
    takes: (token) => token.loose === loose,
  }),
  code: ({ lang = "" }) => {
    const language = languageOf(lang);
    const block = new CodeBlock(language);
    return {
      node: block.node,
      takes: (token) => languageOf(token.lang ?? "") === language,
      update: (token) => block.update(token.text.replace(/\n$/, "")),
    };
  },
  formula: () => {
    const node = make("div");
    return { node, takes: always, update: (token) => node.replaceChildren(formula(token)) };
  },
  table: (token) => table(token),
  row: ({ cells, tag }) => ({
    node: make("tr", {}, ...cells.map((cell) => cellOf(cell, tag))),
    takes: () => false,
    update() {},
  }),
};

function verbatim() {
  const node = make("p", { class: "verbatim" });
  return { node, takes: always, update: (token) => (node.textContent = token.raw.trimEnd()) };
}

function lines(tag) {
  const node = make(tag);
  return { node, takes: always, update: (token) => node.replaceChildren(...inline(token.tokens ?? [token])) };
}

function nested(node, depth, tokensIn) {
  const flow = new Flow(node, depth + 1);
  return { node, takes: always, update: (token) => flow.update(tokensIn(token)) };
}

function table({ header }) {
  const named = header.map((cell) => cell.text).join(", ");
  const body = new Flow(make("tbody"));
  const head = make("tr", {}, ...header.map((cell) => cellOf(cell, "th")));
  const inner = make("table", { "aria-label": `Table: ${named}` }, make("thead", {}, head), body.node);
  return {
    node: make("div", { class: "table", tabIndex: 0, role: "group", "aria-label": `Table: ${named}` }, inner),
    takes: (token) => token.header.map((cell) => cell.text).join(", ") === named,
    update: (token) => body.update(token.rows.map(rowOf)),
  };
}

const rowOf = (cells) => ({ type: "row", raw: cells.map((cell) => cell.text).join("|"), tag: "td", cells });

function cellOf({ tokens, align }, tag) {
  return make(tag, align ? { class: `align-${align}` } : {}, ...inline(tokens));
}

const languageOf = (info) => info.trim().split(/[\s,{]/)[0].toLowerCase();

// --- within a line ---------------------------------------------------------------------------------------------------

const INLINE = {
  text: (token) => (token.tokens ? inline(token.tokens) : [decoded(token.text)]),
  escape: (token) => [token.text],
  strong: (token) => [make("strong", {}, ...inline(token.tokens))],
  em: (token) => [make("em", {}, ...inline(token.tokens))],
  del: (token) => [make("del", {}, ...inline(token.tokens))],
  codespan: (token) => [make("code", {}, token.text)],
  br: () => [make("br")],
  formula: (token) => [formula(token)],
  // Table cells have no other way to break a line.
  html: (token) => [/^<br\s*\/?>$/i.test(token.text) ? make("br") : token.raw],
  checkbox: (token) => [checkbox(token.checked)],
  link: (token) => link(token.href, inline(token.tokens)),
  // The page may load nothing from elsewhere, so images are links.
  image: (token) => link(token.href, [`Image: ${decoded(token.text) || token.href}`]),
};

function inline(tokens) {
  return tokens.flatMap((token) => INLINE[token.type]?.(token) ?? [token.raw]);
}

/** Addresses that could run code, or that lead to this server, do not become links. */
function link(href, content) {
  const url = URL.canParse(href) ? new URL(href) : null;
  if (!LINKED.includes(url?.protocol)) return content;
  return [make("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...content)];
}

const checkbox = (checked) => make("span", { role: "img", "aria-label": checked ? "done" : "to do" }, checked ? "☑ " : "☐ ");

// Entities that models commonly write; others are shown as they are. Without a prototype: &constructor; is none.
const ENTITIES = {
  __proto__: null,
  amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", reg: "®", trade: "™", hellip: "…", mdash: "—",
  ndash: "–", bull: "•", middot: "·", deg: "°", plusmn: "±", times: "×", divide: "÷", le: "≤", ge: "≥", ne: "≠", larr: "←",
  uarr: "↑", rarr: "→", darr: "↓", infin: "∞", euro: "€", pound: "£", lsquo: "‘", rsquo: "’", ldquo: "“", rdquo: "”",
};

function decoded(text) {
  return text.replace(/&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|(\w+));/g, (written, decimal, hex, name) => {
    if (name) return ENTITIES[name] ?? written;
    const code = decimal ? Number(decimal) : parseInt(hex, 16);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : "\ufffd";
  });
}
