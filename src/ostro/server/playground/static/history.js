// The list of conversations beside the chat: find, open, rename, delete, export, import.

import { conversations, exported, forget, imported, keep } from "./archive.js";
import { Conversation } from "./conversation.js";
import { byId, make } from "./dom.js";
import { found, wordsOf } from "./find.js";
import { opensMenu } from "./menu.js";
import { agreed, typed } from "./question.js";

const panel = byId("history");
const list = byId("history-list");
const file = byId("history-file");
const query = byId("history-find");
const note = byId("history-note");
let acts = null;
let drawn = "";

/** `given` are current(), open(conversation or null for a new one, turn to be seen), forgotten(conversation) and
 *  complain(sentence).
 */
export function buildHistory(given) {
  acts = given;
  byId("history-new").addEventListener("click", () => open(null));
  byId("history-import").addEventListener("click", () => file.click());
  byId("history-export").addEventListener("click", () => download("conversations", conversations()));
  file.addEventListener("change", takeFile);
  query.addEventListener("input", () => {
    showHistory();
    tellFound();
  });
  query.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !query.value) return;
    // The first one clears the field, and does not close the list.
    event.preventDefault();
    event.stopPropagation();
    query.value = "";
    query.dispatchEvent(new Event("input"));
  });
  showHistory();
}

export function showHistory() {
  const all = conversations();
  const current = acts.current().id;
  const words = wordsOf(query.value);
  const hits = all.map((conversation) => ({ conversation, hit: found(conversation, words) })).filter(({ hit }) => hit);
  const wanted = JSON.stringify([current, hits.map(({ conversation: { id, name }, hit: { turn, ...excerpt } }) => [id, name, turn?.id, excerpt])]);
  if (wanted === drawn) return;
  drawn = wanted;
  const focused = list.contains(document.activeElement) ? document.activeElement.closest("li").dataset.id : null;
  list.replaceChildren(...hits.map(({ conversation, hit }) => rowOf(conversation, hit, conversation.id === current)));
  list.querySelector(`[data-id="${focused}"] button`)?.focus();
  byId("history-export").disabled = !all.length;
  byId("history-none").hidden = all.length > 0;
}

function tellFound() {
  const count = list.children.length;
  note.textContent = !query.value.trim() ? "" : count ? `Found in ${count} of ${conversations().length}.` : "Nothing has all of these words.";
}

function rowOf(conversation, { turn, before, match, after }, isCurrent) {
  const name = make("button", { type: "button", class: "quiet name", title: conversation.name }, conversation.name);
  if (isCurrent) name.setAttribute("aria-current", "true");
  if (turn) name.append(make("span", { class: "found" }, before, make("mark", {}, match), after));
  name.addEventListener("click", () => open(conversation, turn));
  name.addEventListener("keydown", (event) => {
    if (event.key === "F2") rename(conversation);
  });
  const more = make("button", { type: "button", class: "quiet", "aria-label": `Actions for ${conversation.name}` }, "⋯");
  opensMenu(more, () => [
    ["Rename…", () => rename(conversation)],
    ["New with its parameters", () => open(new Conversation({ settings: structuredClone(conversation.settings) }))],
    ["Export", () => download(conversation.name, [conversation])],
    ["Delete…", () => remove(conversation)],
  ]);
  return make("li", { "data-id": conversation.id }, name, more);
}

function open(conversation, turn = null) {
  if (panel.matches(":popover-open")) panel.hidePopover();
  acts.open(conversation, turn);
}

async function rename(conversation) {
  const text = "Leave it empty for the title that its first message gives it.";
  const title = await typed({ title: "Rename the conversation", text, label: "Name", value: conversation.name, act: "Rename" });
  if (title === null) return;
  // What was not changed is no choice: the title still follows the messages.
  if (title.trim() !== conversation.name) conversation.title = title.trim();
  keep(conversation);
  showHistory();
}

/** Deletes a conversation, after asking the user. */
export async function remove(conversation) {
  const text = "Its messages are deleted from this browser. They are kept nowhere else, unless you exported them.";
  if (!(await agreed({ title: `Delete “${conversation.name}”?`, text, act: "Delete" }))) return;
  forget(conversation);
  acts.forgotten(conversation);
  showHistory();
}

function download(name, list) {
  const url = URL.createObjectURL(new Blob([exported(list)], { type: "application/json" }));
  const plain = name.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation";
  make("a", { href: url, download: `ostro-${plain}.json` }).click();
  URL.revokeObjectURL(url);
}

async function takeFile() {
  const [chosen] = file.files;
  if (!chosen) return;
  try {
    const { added, known } = imported(await chosen.text());
    const stored = added.map(keep).every(Boolean);
    if (!stored) acts.complain("They are here until this page is closed: the browser's storage is full or blocked.");
    query.value = "";
    if (added.length) open(added[0]);
    showHistory();
    note.textContent = importOutcome(added.length, known);
  } catch (error) {
    acts.complain(`“${chosen.name}” cannot be imported. ${error.message}`);
  }
  // Allow the same file to be chosen again.
  file.value = "";
}

function importOutcome(added, known) {
  const here = known === 1 ? "1 was" : `${known} were`;
  if (!added) return known ? `Nothing was added: ${known === 1 ? "it is" : `all ${known} are`} here already.` : "The file has no conversations.";
  return known ? `Imported: ${added}; ${here} here already.` : `Imported: ${added}.`;
}
