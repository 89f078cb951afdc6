// The list of conversations beside the chat: open, rename, delete, export, import.

import { conversations, exported, forget, imported, keep } from "./archive.js";
import { announce, byId, make } from "./dom.js";
import { opensMenu } from "./menu.js";
import { agreed, typed } from "./question.js";

const panel = byId("history");
const list = byId("history-list");
const file = byId("history-file");
let acts = null;
let drawn = "";

/** `given` are current(), open(conversation or null for a new one), forgotten(conversation) and complain(sentence). */
export function buildHistory(given) {
  acts = given;
  byId("history-new").addEventListener("click", () => open(null));
  byId("history-import").addEventListener("click", () => file.click());
  byId("history-export").addEventListener("click", () => download("conversations", conversations()));
  file.addEventListener("change", takeFile);
  showHistory();
}

export function showHistory() {
  const all = conversations();
  const current = acts.current().id;
  const wanted = JSON.stringify([current, all.map(({ id, name }) => [id, name])]);
  if (wanted === drawn) return;
  drawn = wanted;
  const focused = list.contains(document.activeElement) ? document.activeElement.closest("li").dataset.id : null;
  list.replaceChildren(...all.map((conversation) => rowOf(conversation, conversation.id === current)));
  list.querySelector(`[data-id="${focused}"] button`)?.focus();
  byId("history-export").disabled = !all.length;
  byId("history-none").hidden = all.length > 0;
}

function rowOf(conversation, isCurrent) {
  const name = make("button", { type: "button", class: "quiet name", title: conversation.name }, conversation.name);
  if (isCurrent) name.setAttribute("aria-current", "true");
  name.addEventListener("click", () => open(conversation));
  const more = make("button", { type: "button", class: "quiet", "aria-label": `Actions for ${conversation.name}` }, "⋯");
  opensMenu(more, () => [
    ["Rename…", () => rename(conversation)],
    ["Export", () => download(conversation.name, [conversation])],
    ["Delete…", () => remove(conversation)],
  ]);
  return make("li", { "data-id": conversation.id }, name, more);
}

function open(conversation) {
  if (panel.matches(":popover-open")) panel.hidePopover();
  acts.open(conversation);
}

async function rename(conversation) {
  const title = await typed({ title: "Rename the conversation", label: "Name", value: conversation.name, act: "Rename" });
  if (title === null) return;
  conversation.title = title.trim();
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
    const list = imported(await chosen.text());
    const stored = list.map(keep).every(Boolean);
    if (!stored) acts.complain("They are here until this page is closed: the browser's storage is full or blocked.");
    if (list.length) open(list[0]);
    showHistory();
    announce(`Imported: ${list.length}.`);
  } catch (error) {
    acts.complain(`“${chosen.name}” cannot be imported. ${error.message}`);
  }
  // Allow the same file to be chosen again.
  file.value = "";
}
