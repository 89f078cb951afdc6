// The dialog for the API key.

import { byId } from "./dom.js";
import { currentKey, useKey } from "./store.js";

const dialog = byId("key-dialog");
const input = byId("key-input");

/** Calls `onChange` when the key has changed or was removed. */
export function buildKey(onChange) {
  byId("key-open").addEventListener("click", () => {
    input.value = currentKey();
    dialog.showModal();
  });
  const use = (key) => {
    useKey(key);
    input.value = "";
    dialog.close();
    show();
    onChange();
  };
  dialog.querySelector("form").addEventListener("submit", (event) => {
    event.preventDefault();
    use(input.value.trim());
  });
  dialog.querySelector("[data-act=forget]").addEventListener("click", () => use(""));
  dialog.querySelector("[data-act=close]").addEventListener("click", () => dialog.close());
  show();
}

function show() {
  byId("key-open").textContent = currentKey() ? "Key set" : "Key";
}
