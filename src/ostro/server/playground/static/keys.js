// The Enter and Escape keys in message fields.

import { hasKeyboard } from "./dom.js";

/** Whether an input method handles the key, such as Enter to end a word; Safari shows this only in the key code. */
export const isComposing = (event) => event.isComposing || event.keyCode === 229;

/** Whether the key sends its field's text. In fields marked `data-enter=send`, Enter alone does. */
export function sends(event) {
  if (event.key !== "Enter") return false;
  if (event.ctrlKey || event.metaKey) return true;
  return event.target.dataset.enter === "send" && hasKeyboard() && !event.shiftKey && !event.altKey;
}

/** Lets the keyboard submit or cancel a form in the page. `submit`, if given, replaces the form's own submission. */
export function submitByKeys(form, { cancel = null, submit = () => form.requestSubmit() }) {
  form.addEventListener("keydown", (event) => {
    if (isComposing(event)) return;
    if (event.key === "Escape" && cancel) cancel();
    else if (sends(event)) submit(event.target);
    else return;
    event.preventDefault();
    // The key must neither stop an answer nor send the message below.
    event.stopPropagation();
  });
}
