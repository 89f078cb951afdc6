// The conversations that this browser stores: one localStorage entry each, so that two tabs do not overwrite each
// other's. Also their form as a file.

import { Conversation } from "./conversation.js";

const PREFIX = "ostro.conversation.";
const FORMAT = "ostro.conversations";
// Version 1 had no reasoning, calls or results, version 2 no settings; both are read in the same way.
const VERSION = 3;

// What could not be stored stays here until the page is closed.
const kept = new Map();

export function readArchive() {
  kept.clear();
  for (const key of storedKeys()) read(key);
}

/** The latest first. */
export const conversations = () => [...kept.values()].sort((a, b) => (a.updated < b.updated ? 1 : -1));

export const conversationOf = (id) => kept.get(id) ?? null;

/** Returns whether the browser stored it: storage may be blocked or full. */
export function keep(conversation) {
  kept.set(conversation.id, conversation);
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    return true;
  } catch {
    return false;
  }
}

export function forget({ id }) {
  kept.delete(id);
  try {
    localStorage.removeItem(PREFIX + id);
  } catch {
    // It was never stored.
  }
}

/** Calls back with the id of a conversation that another tab has changed or deleted. */
export function onChangeElsewhere(listener) {
  addEventListener("storage", ({ key, newValue }) => {
    if (!key?.startsWith(PREFIX)) return;
    const id = key.slice(PREFIX.length);
    kept.delete(id);
    if (newValue !== null) read(key);
    listener(id);
  });
}

/** Conversations as the text of a file. */
export const exported = (list) => `${JSON.stringify({ format: FORMAT, version: VERSION, conversations: list }, null, 2)}\n`;

/** The conversations in such a text that are not here yet, under new ids, so that none is overwritten; and the number of
 *  the others. Throws Error for any other text.
 */
export function imported(text) {
  let file = null;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("It is not JSON.");
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) throw new Error("This page did not export it.");
  if (![1, 2, VERSION].includes(file.version)) throw new Error(`It has version ${file.version}; this page reads 1 to ${VERSION}.`);
  const fresh = file.conversations.filter((each) => {
    const { turns } = Conversation.from(each);
    return !conversations().some((here) => (!each.created || each.created === here.created) && holds(here, turns));
  });
  const added = fresh.map((each) => new Conversation({ ...Conversation.from(each), id: undefined }));
  return { added, known: file.conversations.length - added.length };
}

/** Whether a conversation, which may have gone on since, has all these turns. */
function holds(conversation, turns) {
  const own = new Map(conversation.turns.map((turn) => [turn.id, sortedJson(turn)]));
  return turns.every((turn) => own.get(turn.id) === sortedJson(turn));
}

const sortedJson = (turn) => JSON.stringify(Object.entries(turn).sort(([a], [b]) => (a < b ? -1 : 1)));

function storedKeys() {
  try {
    return Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  } catch {
    return [];
  }
}

function read(key) {
  try {
    const conversation = Conversation.from(JSON.parse(localStorage.getItem(key)));
    dropUnanswered(conversation);
    kept.set(conversation.id, conversation);
  } catch {
    // Not ours, or broken: left as it is.
  }
}

/** Drops a turn whose page was closed before its first token arrived. */
function dropUnanswered(conversation) {
  const isEmpty = (turn) => turn.role === "assistant" && !turn.content && !turn.reasoning_content && !turn.tool_calls;
  for (const turn of conversation.turns.filter(isEmpty)) conversation.remove(turn);
}
