// The model picker: the server's models and their states; loads and unloads them, if the key allows it.

import { ApiError, ask, askJson } from "./api.js";
import { byId, make } from "./dom.js";
import { opensMenu } from "./menu.js";
import { agreed } from "./question.js";
import { remember, setting } from "./store.js";

const AGAIN_MS = 1000;
const COMING = ["fetching", "loading", "draining"];
const STATES = { available: "not loaded", fetching: "downloading", draining: "unloading" };

const picker = byId("model");
const loader = byId("model-load");
const menu = byId("model-menu");
let cards = [];
let mayManage = false;
// {name, state} of the model that is being loaded or unloaded.
let doing = null;
let timer = 0;
let listeners = [];

export const currentModel = () => picker.value || "default";

/** Registers a listener for the chosen model's card, called when the choice or the card changes. */
export const onModel = (listener) => listeners.push(listener);

export function buildModels({ complain }) {
  picker.addEventListener("change", () => {
    remember("model", picker.value);
    showChosen();
  });
  loader.addEventListener("click", () => tell("load", complain));
  opensMenu(menu, () => [["Unload…", () => unload(complain)]]);
}

/** Fetches the list, and polls it while a model is loading. Throws ApiError if the server refuses. */
export async function refreshModels() {
  clearTimeout(timer);
  try {
    cards = (await askJson("/v1/models")).data;
  } catch (error) {
    cards = [];
    showChosen();
    throw error;
  }
  const wanted = setting("model", picker.value);
  const ids = cards.map((card) => card.id);
  const chosen = ids.includes(wanted) ? wanted : (ids[0] ?? "default");
  if (ids.join("\n") !== [...picker.options].map((option) => option.value).join("\n")) {
    picker.replaceChildren(...(ids.length ? ids : ["default"]).map((id) => make("option", { value: id }, id)));
  }
  picker.value = chosen;
  showChosen();
  if (doing || cards.some((card) => COMING.includes(card.state))) refreshSoon();
}

/** The same after a moment, without reporting errors; retries while the server does not answer. */
export function refreshSoon() {
  clearTimeout(timer);
  timer = setTimeout(() => refreshModels().catch((error) => error.status === 401 || refreshSoon()), AGAIN_MS);
}

/** Finds out whether the key, or its absence, allows /admin; if not, actions that would be refused are hidden. */
export async function refreshRights() {
  try {
    await ask("/admin/stats");
    mayManage = true;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    mayManage = false;
  }
  showChosen();
}

function showChosen() {
  const card = cards.find((each) => each.id === picker.value);
  const state = card && doing?.name === card.id ? doing.state : card?.state;
  byId("model-dot").dataset.state = state ?? "unknown";
  const length = card?.max_model_len ? `${card.max_model_len.toLocaleString("en")} tokens` : "";
  byId("model-fact").textContent = !state ? "" : state === "ready" ? length || "ready" : (STATES[state] ?? state);
  byId("model-fact").title = mayManage ? "" : "Loading and unloading need the admin key.";
  const loaded = state === "ready" || state === "draining";
  loader.hidden = !mayManage || !card || loaded;
  menu.hidden = !mayManage || !loaded;
  loader.disabled = menu.disabled = doing !== null || COMING.includes(card?.state);
  for (const listener of listeners) listener(card);
}

async function unload(complain) {
  const title = `Unload ${picker.value}?`;
  const text = "Requests under way are answered first. The next one has to wait until the model is loaded again.";
  if (await agreed({ title, text, act: "Unload" })) tell("unload", complain);
}

async function tell(verb, complain) {
  const name = picker.value;
  doing = { name, state: verb === "load" ? "loading" : "draining" };
  complain("");
  showChosen();
  refreshSoon();
  try {
    await ask(`/admin/${verb}/${name.split("/").map(encodeURIComponent).join("/")}`, { method: "POST" });
  } catch (error) {
    complain(error.message);
  }
  doing = null;
  await refreshModels().catch((error) => complain(error.message));
}
