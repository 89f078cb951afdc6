// A text file as part of a message: what is accepted, and how it is sent. Knows no server and no page.

// Conversations are kept in the browser, whose storage ends at some 5 MB.
const MOST_BYTES = 1_000_000;
const BYTE_ORDERS = [
  [[0xff, 0xfe], "utf-16le"],
  [[0xfe, 0xff], "utf-16be"],
];

/** {name, size, text} of a chosen File. Throws Error with a sentence for the user if it cannot be part of a message. */
export async function readTextFile(file) {
  if (file.size > MOST_BYTES) throw new Error(refusal(file, `${sizeOf(file)} are too much: a file may have up to 1 MB`));
  let bytes;
  try {
    bytes = new Uint8Array(await file.arrayBuffer());
  } catch {
    throw new Error(refusal(file, "the browser cannot read it, which is so for folders"));
  }
  const text = decoded(bytes);
  if (text === null) throw new Error(refusal(file, "it is not a text file"));
  if (!text.trim()) throw new Error(refusal(file, "it is empty"));
  return { name: file.name, size: file.size, text };
}

export const refusal = ({ name }, reason) => `“${name}” cannot be added: ${reason}.`;

/** The text, or null if the bytes are none. */
function decoded(bytes) {
  const [, encoding] = BYTE_ORDERS.find(([mark]) => mark.every((byte, index) => bytes[index] === byte)) ?? [[], "utf-8"];
  try {
    const text = new TextDecoder(encoding, { fatal: true }).decode(bytes);
    return text.includes("\0") ? null : text.replaceAll("\r\n", "\n");
  } catch {
    return null;
  }
}

function sizeOf({ size }) {
  if (size < 1000) return `${size} byte${size === 1 ? "" : "s"}`;
  return size < 1_000_000 ? `${(size / 1000).toFixed(size < 10_000 ? 1 : 0)} kB` : `${(size / 1_000_000).toFixed(1)} MB`;
}

/** Its size, and how many tokens it has, if that is known. */
export function factsOf(file) {
  const { tokens } = file;
  return tokens === undefined ? sizeOf(file) : `${sizeOf(file)}, ${tokens.toLocaleString("en")} token${tokens === 1 ? "" : "s"}`;
}

/** The text of a message: its files, each in a fence, and then what the user wrote. */
export function withFiles(content, files = []) {
  return [...files.map(fenced), content].filter(Boolean).join("\n\n");
}

function fenced({ name, text }) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${name}:\n\n${fence}${languageOf(name)}\n${text.replace(/\n$/, "")}\n${fence}`;
}

export const languageOf = (name) => /\.(\w{1,12})$/.exec(name)?.[1].toLowerCase() ?? "";

/** The files of an imported turn, with nothing but the fields that were checked. */
export function checkedFiles(files) {
  const isFile = (each) => typeof each?.name === "string" && typeof each.text === "string" && Number.isSafeInteger(each.size);
  if (!Array.isArray(files) || !files.every(isFile)) throw new Error("A file in a conversation has no name or no text.");
  return files.map(({ name, size, text, tokens }) => ({ name, size, text, ...(Number.isSafeInteger(tokens) && { tokens }) }));
}
