// The dialog for the API key. Opens by itself when the server wants one, and checks a key before it is used.

import { ask, askForKeysBy } from "./api.js";
import { byId } from "./dom.js";
import { currentKey, isKeyRemembered, useKey } from "./store.js";

const PLAIN = "A server that was started with keys wants one.";
const WANTED = "This server wants a key. What was refused is tried again with it.";
const KEPT = {
  false: "It is kept in this tab until you close it.",
  true: "It is kept in this browser's local storage until you press Forget. Whoever uses this browser profile can read it.",
};

const dialog = byId("key-dialog");
const input = byId("key-input");
const remembers = byId("key-remember");
const note = byId("key-note");
const submit = dialog.querySelector("[type=submit]");

// What a key must be good for, and who waits for one.
let probe = null;
let waiting = [];

/** Calls `onChange` when the key has changed or was removed. */
export function buildKey(onChange) {
  const use = (key) => {
    useKey(key, { remembered: remembers.checked });
    settle(Boolean(key));
    show();
    onChange();
  };
  byId("key-open").addEventListener("click", () => open("/metrics", PLAIN));
  askForKeysBy(wanted);
  dialog.querySelector("form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const key = input.value.trim();
    if (!key || (await isAccepted(key))) use(key);
  });
  dialog.querySelector("[data-act=forget]").addEventListener("click", () => use(""));
  dialog.querySelector("[data-act=close]").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => settle(false));
  remembers.addEventListener("change", showKept);
  show();
}

/** Opens the dialog for a request that was refused; resolves to whether there is another key now. */
function wanted(path, sentence) {
  // Every key is good for the metrics, and only keys are.
  const good = path.startsWith("/admin/") ? "/admin/stats" : "/metrics";
  if (!dialog.open) open(good, currentKey() ? PLAIN : WANTED, currentKey() ? sentence : "");
  return new Promise((resolve) => waiting.push(resolve));
}

function open(path, why, flaw = "") {
  probe = path;
  byId("key-why").textContent = why;
  note.textContent = flaw;
  input.value = currentKey();
  remembers.checked = isKeyRemembered();
  showKept();
  dialog.showModal();
  input.select();
}

async function isAccepted(key) {
  note.textContent = "";
  submit.disabled = true;
  try {
    await ask(probe, { key });
    return true;
  } catch (error) {
    note.textContent = error.message;
    input.select();
    return false;
  } finally {
    submit.disabled = false;
  }
}

function settle(outcome) {
  const all = waiting;
  waiting = [];
  input.value = "";
  if (dialog.open) dialog.close();
  for (const resolve of all) resolve(outcome);
}

function show() {
  byId("key-open").textContent = currentKey() ? "Key set" : "Key";
}

function showKept() {
  byId("key-kept").textContent = KEPT[remembers.checked];
}
