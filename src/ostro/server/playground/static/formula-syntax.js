// Where formulas stand in Markdown: `\( \)`, `\[ \]`, `$$ $$` and `$ $`, as an extension of marked, which would take
// their backslashes, asterisks and bars for its own. Knows what tells a formula from a price; knows no TeX otherwise.

import { Lexer, Marked, Tokenizer } from "./vendor/marked.esm.js";

// A longer text between two delimiters is Markdown.
const LONGEST = 4000;

// Pairs of characters are passed over, so that the `\\[2em]` of a matrix neither opens nor closes anything.
const CLOSED = [
  { pattern: /^\\\(((?:\\[^)]|[^\\])*)\\\)/, display: false, accepts: () => true },
  { pattern: /^\\\[((?:\\[^\]]|[^\\])*)\\\]/, display: true, accepts: () => true },
  { pattern: /^\$\$(?!\$)((?:\\[\s\S]|[^\\$]|\$(?!\$))*)\$\$(?!\$)/, display: true, accepts: isPlausible },
  { pattern: /^\$(?![\s$])((?:\\[^\n]|[^\\$\n`])*)(?<!\s)\$/, display: false, accepts: isNoPrice },
];
const OPENS = /^(?:\\[([]|\$\$?)/;
const BLOCK_OPENS = /^ {0,3}(?=\\\[|\$\$)/;
// Behind a displayed formula it belongs to its line.
const FULL_STOP = /^[.,;:](?=\s|$)/;
const LINE_ENDS = /^[ \t]*(?=\n|$)/;
// TeX has none of these within a formula either.
const EMPTY_LINE = /\n[ \t]*\n/;
const COMMAND = /\\[a-zA-Z]{2}/;

/** The formula at the beginning of a text, as a token of marked; null if there is none. `before` is the character
 *  before it, and `growing` says that more of the text may come: a formula whose end has not come yet is `open`. */
function formulaIn(text, { before = "", growing = false }) {
  const source = text.slice(0, LONGEST);
  for (const { pattern, display, accepts } of CLOSED) {
    const [raw, inner] = pattern.exec(source) ?? [];
    if (raw === undefined) continue;
    const tex = inner.trim();
    if (!tex || EMPTY_LINE.test(tex) || !accepts(tex, before, text.slice(raw.length, raw.length + 4))) return null;
    const [stop] = (display && FULL_STOP.exec(text.slice(raw.length, raw.length + 2))) || [""];
    return { type: "formula", raw: raw + stop, tex: tex + stop, display, open: false };
  }
  return openIn(text, growing);
}

/** A formula that reaches to the end of the text. Dollars make one only if there is a command of TeX behind them. */
function openIn(text, growing) {
  const [opens] = OPENS.exec(text) ?? [];
  const tex = text.slice(opens?.length);
  if (!opens || text.length > LONGEST || EMPTY_LINE.test(tex.trim())) return null;
  const isDollar = opens.startsWith("$");
  if (isDollar && (tex.includes("$") || (opens === "$" && tex.includes("\n")))) return null;
  const isExpected = growing && (!isDollar || /^[ \t]*\n/.test(tex));
  if (!isExpected && !COMMAND.test(tex)) return null;
  return { type: "formula", raw: text, tex, display: opens !== "\\(" && opens !== "$", open: true };
}

/** Whether `$$tex$$` is a formula: "restaurants ($$) and ($$)" is none. */
function isPlausible(tex) {
  return /[\\^_=<>+*/\d]|^[a-zA-Z]$/.test(tex);
}

/** Whether `$tex$` is a formula, and no price or variable: "$5 and $6", "US$5", "$5-$10", "$HOME/$USER". */
function isNoPrice(tex, before, after) {
  if (/[\p{L}\d$\\]/u.test(before)) return false;
  if (/^[\p{L}\d]/u.test(after) && !/^(?:st|nd|rd|th|s)\b/.test(after)) return false;
  const words = tex.replace(/\\[a-zA-Z]+\s*(?:\{[^{}]*\})?/g, "").match(/(?<=^|[\s(])[a-z]{2,}(?=[\s).,;:!?]|$)/gi) ?? [];
  return COMMAND.test(tex) || words.length <= (/^\d/.test(tex) ? 0 : 1);
}

/** The first line of the same paragraph, but for its first, that begins with a displayed formula. */
function nextLineWithFormula(text) {
  const next = /\n(?:[ \t]*\n| {0,3}(\\\[|\$\$))/.exec(text);
  return next?.[1] ? next : null;
}

const inBlocks = {
  name: "formula",
  level: "block",
  /** Where a paragraph may end before its empty line. */
  start: (text) => nextLineWithFormula(text)?.index,
  tokenizer(text) {
    const [indent] = BLOCK_OPENS.exec(text) ?? [];
    const found = indent !== undefined && formulaIn(text.slice(indent.length), this.lexer.options);
    if (!found) return undefined;
    const raw = indent + found.raw;
    const [ending] = LINE_ENDS.exec(text.slice(raw.length)) ?? [];
    return ending === undefined ? undefined : noted({ ...found, raw: raw + ending }, this.lexer);
  },
};

const inLines = {
  name: "formula",
  level: "inline",
  /** Where text may end. It ends by itself at these other signs. */
  start(text) {
    const next = text.search(/[\\<![`*~_$]/);
    return text[next] === "$" ? next : undefined;
  },
  tokenizer(text, tokens) {
    if (!OPENS.test(text)) return undefined;
    const found = formulaIn(text, { growing: this.lexer.options.growing, before: tokens.at(-1)?.raw.at(-1) });
    return found ? noted(found, this.lexer) : undefined;
  },
};

function noted(token, { options }) {
  options.isOpen ||= token.open;
  return token;
}

const { defaults } = new Marked({ gfm: true, breaks: true, extensions: [inBlocks, inLines] });

/** Remembers the text whose emphasis is looked for: the hook gets it without its escapes. */
class FormulaLexer extends Lexer {
  text = "";

  inlineTokens(text, tokens) {
    this.text = text;
    return super.inlineTokens(text, tokens);
  }
}

/** Takes no line of a formula, such as a lone `=`, for the rule below a heading. */
class FormulaTokenizer extends Tokenizer {
  lheading(text) {
    const found = super.lheading(text);
    return found && nextLineWithFormula(found.text) ? undefined : found;
  }
}

/** Hides formulas from the search for emphasis: `*a \(b*c\)*`. */
function emStrongMask(mask) {
  const { text, options } = this.lexer;
  const candidate = /\\[\s\S]|\$/g;
  const hidden = [];
  for (let match = candidate.exec(text); match; match = candidate.exec(text)) {
    const { index } = match;
    // Code is hidden already.
    const found = "$+".includes(mask[index]) && formulaIn(text.slice(index), { growing: options.growing, before: text[index - 1] ?? "" });
    if (!found) continue;
    hidden.push([index, index + found.raw.length]);
    candidate.lastIndex = index + found.raw.length;
  }
  let end = 0;
  const parts = hidden.map(([from, to]) => {
    const part = mask.slice(end, from) + "a".repeat(to - from);
    end = to;
    return part;
  });
  return parts.join("") + mask.slice(end);
}

/** The tokens of a Markdown text, with `links`. `isOpen` says whether one of its formulas lacks its end. */
export function tokensWithFormulas(text, { growing }) {
  const options = { ...defaults, tokenizer: new FormulaTokenizer(), hooks: { emStrongMask }, growing, isOpen: false };
  const tokens = new FormulaLexer(options).lex(text);
  return Object.assign(tokens, { isOpen: options.isOpen });
}
