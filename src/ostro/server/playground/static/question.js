// The dialog that asks before something is lost, or for a name.

import { byId } from "./dom.js";

const dialog = byId("question");
const input = byId("question-input");

/** Asks the user to confirm; returns whether they did. `act` is the button's label, such as "Unload". */
export async function agreed({ title, text, act }) {
  return (await ask({ title, text, act })) !== null;
}

/** The text that the user typed, or null if they cancelled. */
export const typed = ({ title, text, label, value, act }) => ask({ title, text, label, value, act });

function ask({ title, text = "", label = "", value = "", act }) {
  byId("question-title").textContent = title;
  byId("question-text").textContent = text;
  byId("question-text").hidden = !text;
  byId("question-label").textContent = label;
  byId("question-field").hidden = !label;
  byId("question-act").textContent = act;
  input.value = value;
  dialog.returnValue = "";
  dialog.showModal();
  if (label) input.select();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "act" ? input.value : null), { once: true });
  });
}

export function buildQuestion() {
  // Not form method=dialog: the page's policy forbids every form action.
  dialog.querySelector("form").addEventListener("submit", (event) => {
    event.preventDefault();
    dialog.close("act");
  });
  dialog.querySelector("[data-act=close]").addEventListener("click", () => dialog.close());
}
