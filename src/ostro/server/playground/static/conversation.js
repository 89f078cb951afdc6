// A conversation is a tree of turns: an edited message, or another answer, becomes a sibling of the earlier version.
// One branch of it is shown. Knows no storage and no page.

const ROLES = ["user", "assistant", "tool"];
const ROOT = 0;
const NAME_LENGTH = 60;

export class Conversation {
  constructor({ id = freshId(), title = "", created = now(), updated = created, turns = [], shown = {} } = {}) {
    Object.assign(this, { id, title, created, updated, turns, shown });
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
    });
  }

  get name() {
    const first = this.turns.find((turn) => turn.role === "user")?.content.trim().split("\n")[0] ?? "";
    return this.title || (first.length > NAME_LENGTH ? `${first.slice(0, NAME_LENGTH).trimEnd()}…` : first) || "New conversation";
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

  /** All versions of a turn, including itself, oldest first. */
  versionsOf(turn) {
    return this.turns.filter((each) => each.parent === turn.parent);
  }

  /** Adds a turn below `parent`, or at the top if that is null, and shows it. */
  add(parent, turn) {
    const id = Math.max(ROOT, ...this.turns.map((each) => each.id)) + 1;
    const added = { id, parent: parent?.id ?? ROOT, ...turn };
    this.turns.push(added);
    this.show(added);
    return added;
  }

  show(turn) {
    this.shown[turn.parent] = turn.id;
    this.updated = now();
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
export function messagesOf({ role, content, reasoning_content, tool_calls, results }) {
  if (role === "tool") return results.map((result) => ({ role, ...result }));
  return [{ role, content, ...(reasoning_content && { reasoning_content }), ...(tool_calls && { tool_calls }) }];
}

function checked(turn, known) {
  const { id, parent, role } = turn ?? {};
  if (!Number.isSafeInteger(id) || known.has(id)) throw new Error("A turn of a conversation has no id of its own.");
  if (!known.has(parent)) throw new Error("A turn of a conversation follows one that is not there.");
  if (!ROLES.includes(role)) throw new Error("A turn of a conversation has no role.");
  known.add(id);
  return { id, parent, role, ...(role === "tool" ? { results: checkedResults(turn) } : checkedText(turn)) };
}

function checkedText({ content, model, reasoning_content, thought_ms, tool_calls }) {
  if (typeof content !== "string") throw new Error("A turn of a conversation has no text.");
  return {
    content,
    ...(typeof model === "string" && { model }),
    ...(typeof reasoning_content === "string" && { reasoning_content }),
    ...(Number.isFinite(thought_ms) && { thought_ms }),
    ...(tool_calls !== undefined && { tool_calls: checkedCalls(tool_calls) }),
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
