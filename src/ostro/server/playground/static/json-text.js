// JSON as text: detected and indented. Nothing here changes a number or a string.

const TOKENS = /"(?:[^"\\]|\\.)*(?:"|\\?$)|[{}[\],:]|[^\s"{}[\],:]+/gs;
const OPENS = ["{", "["];
const CLOSES = ["}", "]"];
const MARKS = [...OPENS, ...CLOSES, ",", ":"];

/** Whether a text is a JSON object or array, whole or cut off. A number or a word alone may as well be prose. */
export function isJson(text) {
  if (!/^\s*[{[]/.test(text)) return false;
  let depth = 0;
  for (const [token] of text.matchAll(TOKENS)) {
    depth += OPENS.includes(token) - CLOSES.includes(token);
    if (depth === 0) return isWhole(text);
  }
  return /^\s*(?:\{\s*(?:"|$)|\[\s*(?:[{"]|$))/.test(text);
}

function isWhole(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

/** The same JSON, possibly incomplete, with one value per line. Without JSON.parse, which rounds long numbers. */
export function indented(text) {
  let laidOut = "";
  let depth = 0;
  let before = "";
  const newLine = () => `\n${"  ".repeat(depth)}`;
  for (const [token] of text.matchAll(TOKENS)) {
    if (CLOSES.includes(token)) depth = Math.max(depth - 1, 0);
    // An empty object or array stays on its line.
    if (CLOSES.includes(token) !== OPENS.includes(before) || before === ",") laidOut += newLine();
    else if (before === ":" || (before && !MARKS.includes(before) && !MARKS.includes(token))) laidOut += " ";
    if (OPENS.includes(token)) depth++;
    laidOut += token;
    before = token;
  }
  return laidOut;
}
