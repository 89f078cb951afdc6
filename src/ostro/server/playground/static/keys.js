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
