// A conversation is a tree of turns: an edited message, or another answer, becomes a sibling of the earlier version.
// One branch of it is shown. Knows no storage and no page.

import { isEarlyEnd } from "./endings.js";
import { checkedFiles, withFiles } from "./text-file.js";
import { titleFrom } from "./title.js";

const ROLES = ["user", "assistant", "tool"];
const ROOT = 0;

export class Conversation {
  constructor({ id = freshId(), title = "", created = now(), updated = created, turns = [], shown = {}, settings = {} } = {}) {
    // `settings` are the system prompt and the parameters of the next request; a turn has those of its own request where
    // they are not those of the turn before it.
    Object.assign(this, { id, title, created, updated, turns, shown, settings });
  }

  /** Throws an Error with a sentence for the user if `given` is not a conversation. */
  static from(given) {
    if (typeof given?.id !== "string" || !given.id || !Array.isArray(given.turns)) throw new Error("A conversation has no turns.");
    const known = new Set([ROOT]);
    const turns = given.turns.map((turn) => checked(turn, known));
    const parents = new Map(turns.map((turn) => [turn.id, turn.parent]));
    const shown = Object.entries(given.shown ?? {}).filter(([parent, child]) => parents.get(child) === Number(parent));
    const text = (value) => (typeof value === "string" ? value : undefined);
    return new Conversation({
      id: given.id,
      title: text(given.title),
      created: text(given.created),
      updated: text(given.updated),
      turns,
      shown: Object.fromEntries(shown),
      settings: checkedSettings(given.settings),
    });
  }

  get name() {
    const asked = this.turns.filter((turn) => turn.role === "user");
    const said = asked.map((turn) => (turn.content.trim() ? turn.content : (turn.files?.[0]?.name ?? "")));
    return this.title || titleFrom(said) || "New conversation";
  }

  /** The turns that are shown, from the first to the last. */
  get path() {
    const below = grouped(this.turns);
    const path = [];
    for (let turns = below.get(ROOT); turns; turns = below.get(path.at(-1).id)) {
      const chosen = this.shown[turns[0].parent];
      path.push(turns.find((turn) => turn.id === chosen) ?? turns.at(-1));
    }
    return path;
  }

  /** The turns on the path to a turn, including itself. */
  pathTo(turn) {
    const byId = new Map(this.turns.map((each) => [each.id, each]));
    const path = [];
    for (let each = turn; each; each = byId.get(each.parent)) path.unshift(each);
    return path;
  }

  /** The system prompt and parameters that the last answer on a path was made with. */
  settingsOf(path) {
    return path.findLast((turn) => turn.settings)?.settings ?? {};
  }

  /** Adds an answer, which is made with the settings of now. */
  addAnswer(parent, turn) {
    const isSame = sameSettings(this.settings, this.settingsOf(this.pathTo(parent)));
    return this.add(parent, { ...turn, ...(!isSame && { settings: structuredClone(this.settings) }) });
  }

  /** All versions of a turn, including itself, oldest first. */
  versionsOf(turn) {
    return this.turns.filter((each) => each.parent === turn.parent);
  }

  /** Adds a turn below `parent`, or at the top if that is null, and shows it. */
  add(parent, turn) {
    const id = Math.max(ROOT, ...this.turns.map((each) => each.id)) + 1;
    const added = { id, parent: parent?.id ?? ROOT, ...turn };
    this.turns.push(added);
    this.shown[added.parent] = added.id;
    this.updated = now();
    return added;
  }

  /** Shows a version of a turn; what was asked with other settings brings those back. */
  show(turn) {
    this.updated = now();
    this.#follow(() => (this.shown[turn.parent] = turn.id));
  }

  /** Shows the branch that a turn is on. */
  reveal(turn) {
    this.#follow(() => {
      for (const each of this.pathTo(turn)) this.shown[each.parent] = each.id;
    });
  }

  #follow(change) {
    const before = this.settingsOf(this.path);
    change();
    const after = this.settingsOf(this.path);
    if (!sameSettings(before, after)) this.settings = structuredClone(after);
  }

  /** Removes a turn and everything below it. */
  remove(turn) {
    const gone = new Set([turn.id]);
    // A turn always comes after its parent.
    for (const each of this.turns) if (gone.has(each.parent)) gone.add(each.id);
    this.turns = this.turns.filter((each) => !gone.has(each.id));
    for (const id of gone) delete this.shown[id];
    if (this.shown[turn.parent] === turn.id) delete this.shown[turn.parent];
  }
}

/** A turn as API messages: each call's result is a message of its own. */
export function messagesOf({ role, content, files, reasoning_content, tool_calls, results }) {
  if (role === "tool") return results.map((result) => ({ role, ...result }));
  if (role === "user") return [{ role, content: withFiles(content, files) }];
  return [{ role, content, ...(reasoning_content && { reasoning_content }), ...(tool_calls && { tool_calls }) }];
}

/** Whether requests with them would be the same. */
export function sameSettings(one, other) {
  const sorted = (settings) => JSON.stringify(Object.entries(settings).sort(([a], [b]) => (a < b ? -1 : 1)));
  return sorted(one) === sorted(other);
}

/** Values by the parameters' names; the parameters themselves check which of them they accept. */
function checkedSettings(given) {
  if (given === undefined) return {};
  const isValue = (each) => ["string", "number", "boolean"].includes(typeof each) || (each && typeof each === "object");
  if (given === null || typeof given !== "object" || Array.isArray(given)) throw new Error("The parameters of a conversation are no object.");
  return Object.fromEntries(Object.entries(given).filter(([, value]) => isValue(value)));
}

function checked(turn, known) {
  const { id, parent, role } = turn ?? {};
  if (!Number.isSafeInteger(id) || known.has(id)) throw new Error("A turn of a conversation has no id of its own.");
  if (!known.has(parent)) throw new Error("A turn of a conversation follows one that is not there.");
  if (!ROLES.includes(role)) throw new Error("A turn of a conversation has no role.");
  known.add(id);
  return { id, parent, role, ...(role === "tool" ? { results: checkedResults(turn) } : checkedText(turn)) };
}

function checkedText({ content, model, reasoning_content, thought_ms, tool_calls, ended, files, settings }) {
  if (typeof content !== "string") throw new Error("A turn of a conversation has no text.");
  return {
    content,
    ...(typeof model === "string" && { model }),
    ...(typeof reasoning_content === "string" && { reasoning_content }),
    ...(Number.isFinite(thought_ms) && { thought_ms }),
    ...(isEarlyEnd(ended) && { ended }),
    ...(files?.length && { files: checkedFiles(files) }),
    ...(tool_calls !== undefined && { tool_calls: checkedCalls(tool_calls) }),
    ...(settings !== undefined && { settings: checkedSettings(settings) }),
  };
}

function checkedCalls(calls) {
  if (!Array.isArray(calls) || !calls.length) throw new Error("A turn of a conversation has no calls in its list of calls.");
  return calls.map(checkedCall);
}

// The field that holds what a call of each type says.
const SAID = new Map([["function", "arguments"], ["custom", "input"]]);

/** The call with nothing but the fields that were checked: the page draws whatever it finds in a call. */
function checkedCall(call) {
  const { id, type } = call ?? {};
  const field = SAID.get(type);
  const { name, [field]: said } = (field && call[type]) ?? {};
  if (![id, name, said].every((each) => typeof each === "string")) throw new Error("A call in a conversation has no name or no arguments.");
  return { id, type, [type]: { name, [field]: said } };
}

function checkedResults({ results }) {
  const isResult = (each) => typeof each?.tool_call_id === "string" && typeof each.content === "string";
  if (!Array.isArray(results) || !results.every(isResult)) throw new Error("A result in a conversation has no call or no text.");
  return results;
}

function grouped(turns) {
  const groups = new Map();
  for (const turn of turns) {
    if (!groups.has(turn.parent)) groups.set(turn.parent, []);
    groups.get(turn.parent).push(turn);
  }
  return groups;
}

const now = () => new Date().toISOString();

// Not crypto.randomUUID: browsers offer it only in secure contexts (TLS or localhost).
const freshId = () => [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
