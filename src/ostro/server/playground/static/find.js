// Finds words in conversations. Knows no storage and no page.

const AROUND = 40;

/** How a text is compared: without case and accents. Keeps the length of what it can, so that places agree. */
const plain = (text) => (/^[\0-\x7f]*$/.test(text) ? text.toLowerCase() : [...text].map(plainLetter).join(""));

function plainLetter(letter) {
  const bare = letter.normalize("NFD").replace(/\p{M}/gu, "").toLowerCase();
  return bare.length === letter.length ? bare : letter;
}

/** The words of a query, as they are compared. */
export const wordsOf = (query) => plain(query).split(/\s+/).filter(Boolean);

/** {turn, before, match, after} of the latest turn that has all words, or of the title, which has no turn; or null. */
export function found(conversation, words) {
  const isIn = (text) => words.every((word) => text.includes(word));
  const turn = conversation.turns.findLast((each) => isIn(plain(textOf(each))));
  if (isIn(plain(conversation.name))) return { turn: null, before: "", match: "", after: "" };
  return turn ? { turn, ...excerpt(textOf(turn), words[0]) } : null;
}

/** All that a turn says, with its calls and results. */
function textOf({ content, reasoning_content, tool_calls, results }) {
  const calls = (tool_calls ?? []).flatMap(({ type, [type]: call }) => [call.name, call.arguments ?? call.input]);
  return [content, reasoning_content, ...calls, ...(results ?? []).map((each) => each.content)].filter(Boolean).join("\n");
}

function excerpt(text, word) {
  const at = Math.max(plain(text).indexOf(word), 0);
  const start = at > AROUND ? text.indexOf(" ", at - AROUND) + 1 || at - AROUND : 0;
  const from = Math.min(start, at);
  const end = at + word.length;
  const tidy = (part) => part.replace(/\s+/g, " ");
  return {
    before: (from ? "…" : "") + tidy(text.slice(from, at)),
    match: tidy(text.slice(at, end)),
    after: tidy(text.slice(end, end + 2 * AROUND)),
  };
}
