// The title that a conversation gets from its messages, until the user gives it another. Knows texts only.

const LENGTH = 60;
// A first message that says nothing about the conversation.
const GREETING = /^(?:hi|hello|hey|hallo|hola|salut|bonjour|ciao|good (?:morning|afternoon|evening)|test(?:ing)?|ping)\b[\s\w]{0,12}[!.?…]*$/iu;

/** The title for a conversation with these messages of the user; empty if none of them has a text. */
export function titleFrom(messages) {
  const lines = messages.map(tellingLine).filter(Boolean);
  return shortened(lines.find((line) => !GREETING.test(line)) ?? lines[0] ?? "");
}

/** The first line in prose, without Markdown's signs; of a message that is nothing but code, the first line of that. */
function tellingLine(text) {
  const prose = text.replace(/^(`{3,}|~{3,})[^\n]*\n[\s\S]*?(?:^\1[^\n]*$|$(?![\s\S]))/gm, "");
  return firstLine(prose) || firstLine(text.replace(/^[`~]{3,}.*$/gm, ""));
}

function firstLine(text) {
  const lines = text.split("\n").map((line) =>
    line
      .replace(/^\s*(?:#{1,6}\s+|>\s*|[-*+]\s+|\d{1,3}[.)]\s+)/, "")
      .replace(/(\*\*|__|`)(\S(?:.*?\S)?)\1/g, "$2")
      .replace(/!?\[([^\]]+)\]\([^)]*\)/g, "$1")
      .replace(/\s+/g, " ")
      .trim(),
  );
  return lines.find((line) => /[\p{L}\p{N}]/u.test(line)) ?? lines.find(Boolean) ?? "";
}

/** Ends with a sentence if one ends early enough, otherwise with a word. */
function shortened(line) {
  if (line.length <= LENGTH) return line;
  const begun = [...line].slice(0, LENGTH).join("");
  const sentence = /^.{12,}?[.!?…。！？](?=\s|$)/u.exec(begun)?.[0];
  if (sentence) return sentence;
  const space = begun.lastIndexOf(" ");
  return `${(space > LENGTH / 2 ? begun.slice(0, space) : begun).replace(/[\s,;:–-]+$/u, "")}…`;
}
