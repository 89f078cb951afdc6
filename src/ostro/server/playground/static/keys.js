// What Enter means, wherever a message is written.

import { hasKeyboard } from "./dom.js";

/** Whether the key belongs to an input method, which takes Enter to end a word; Safari tells that by the code alone. */
export const isComposing = (event) => event.isComposing || event.keyCode === 229;

/** Whether the key sends what is written in its field. In fields marked `data-enter=send` Enter alone does. */
export function sends(event) {
  if (event.key !== "Enter") return false;
  if (event.ctrlKey || event.metaKey) return true;
  return event.target.dataset.enter === "send" && hasKeyboard() && !event.shiftKey && !event.altKey;
}

/** Lets the keyboard send a form in the middle of the page, and leave it. `submit`, if given, decides what sending is. */
export function submitByKeys(form, { cancel = null, submit = () => form.requestSubmit() }) {
  form.addEventListener("keydown", (event) => {
    if (isComposing(event)) return;
    if (event.key === "Escape" && cancel) cancel();
    else if (sends(event)) submit(event.target);
    else return;
    event.preventDefault();
    // Neither stops an answer nor sends the message below.
    event.stopPropagation();
  });
}
