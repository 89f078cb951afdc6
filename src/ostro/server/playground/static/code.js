// The dialog that shows a request as code, and copies it.

import { urlOf } from "./api.js";
import { copied } from "./clipboard.js";
import { byId } from "./dom.js";
import { SNIPPETS } from "./snippets.js";
import { currentKey, remember, setting } from "./store.js";

const dialog = byId("code-dialog");
let request = null;
// Why there is no request to show.
let reason = "";

export function buildCode() {
  for (const radio of dialog.querySelectorAll("[name=language]")) {
    radio.checked = radio.value === setting("language", "curl");
    radio.addEventListener("change", () => (remember("language", radio.value), show()));
  }
  dialog.querySelector("[data-act=close]").addEventListener("click", () => dialog.close());
  byId("code-copy").addEventListener("click", copy);
}

/** `draft()` is the request that a mode would send now, or null; throws Error if a parameter is invalid. */
export function openCode(draft) {
  try {
    const drafted = draft();
    request = drafted && { url: urlOf(drafted.path), body: drafted.body, withKey: Boolean(currentKey()) };
    reason = "There is nothing to send yet.";
  } catch (error) {
    request = null;
    reason = error.message;
  }
  show();
  dialog.showModal();
}

function show() {
  const language = dialog.querySelector("[name=language]:checked").value;
  byId("code-text").textContent = request ? SNIPPETS[language](request) : reason;
  byId("code-copy").disabled = !request;
  byId("code-note").textContent = request?.withKey ? "The key is read from OSTRO_API_KEY." : "";
}

async function copy() {
  const done = await copied(byId("code-text").textContent);
  if (!done) getSelection().selectAllChildren(byId("code-text"));
  byId("code-note").textContent = done ? "Copied." : "Selected: copy it with the keyboard.";
}
