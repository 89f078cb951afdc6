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
// By name: the sampling defaults of models that are not loaded, which the list leaves out.
const recommended = new Map();
let timer = 0;
let listeners = [];
let page = null;

export const currentModel = () => picker.value || "default";

/** The models as last listed, and whether the key allows loading and unloading them. */
export const cardsNow = () => cards;
export const canManage = () => mayManage;

/** A model's name in a URL; it may have slashes. */
export const nameInPath = (name) => name.split("/").map(encodeURIComponent).join("/");

/** A card's state in words. */
export const labelOf = ({ state }) => STATES[state] ?? state;

/** Chooses a model. */
export function pick(name) {
  picker.value = name;
  remember("model", picker.value);
  showChosen();
  learnDefaults();
}

/** Registers a listener for the chosen model's card, called when the choice or the card changes. */
export const onModel = (listener) => listeners.push(listener);

/** `report(error)` shows an error, and `clear()` removes the one that is shown. */
export function buildModels({ report, clear }) {
  picker.addEventListener("change", () => pick(picker.value));
  loader.addEventListener("click", () => tell("load", picker.value));
  page = { report, clear };
  opensMenu(menu, () => [["Unload…", () => unload(picker.value)]]);
}

/** Fetches the list, and polls it while a model is loading. Throws ApiError if the server refuses; asks for a key before
 *  that, unless it is `quiet`.
 */
export async function refreshModels({ quiet = false } = {}) {
  clearTimeout(timer);
  try {
    cards = (await askJson("/v1/models", { quiet })).data;
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
  learnDefaults();
  if (doing || cards.some((card) => COMING.includes(card.state))) refreshSoon();
}

/** The same after a moment, without reporting errors; retries while the server does not answer. */
export function refreshSoon() {
  clearTimeout(timer);
  timer = setTimeout(() => refreshModels({ quiet: true }).catch((error) => error.status === 401 || refreshSoon()), AGAIN_MS);
}

/** Finds out whether the key, or its absence, allows /admin; if not, actions that would be refused are hidden. */
export async function refreshRights() {
  try {
    await ask("/admin/stats", { quiet: true });
    mayManage = true;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    mayManage = false;
  }
  showChosen();
}

/** Asks what the chosen model recommends if the list does not say so, once. */
async function learnDefaults() {
  const card = chosenCard();
  if (!card || card.sampling_defaults || recommended.has(card.id)) return;
  recommended.set(card.id, null);
  try {
    recommended.set(card.id, (await askJson(`/v1/models/${nameInPath(card.id)}`, { quiet: true })).sampling_defaults);
  } catch {
    // Its answer will say what is wrong.
    recommended.delete(card.id);
    return;
  }
  showChosen();
}

function chosenCard() {
  const card = cards.find((each) => each.id === picker.value);
  return card && { ...card, sampling_defaults: card.sampling_defaults ?? recommended.get(card.id) ?? null };
}

function showChosen() {
  const card = chosenCard();
  const state = card && doing?.name === card.id ? doing.state : card?.state;
  byId("model-dot").dataset.state = state ?? "unknown";
  const length = card?.max_model_len ? `${card.max_model_len.toLocaleString("en")} tokens` : "";
  byId("model-fact").textContent = !state ? "" : state === "ready" ? length || "ready" : labelOf({ state });
  byId("model-fact").title = mayManage ? "" : "Loading and unloading need the admin key.";
  const loaded = state === "ready" || state === "draining";
  loader.hidden = !mayManage || !card || loaded;
  menu.hidden = !mayManage || !loaded;
  loader.disabled = menu.disabled = doing !== null || COMING.includes(card?.state);
  for (const listener of listeners) listener(card);
}

/** Asks the user first. Errors go to `report`, or to the notice of the page. */
export async function unload(name, { report = page.report } = {}) {
  const title = `Unload ${name}?`;
  const text = "Requests under way are answered first. The next one has to wait until the model is loaded again.";
  if (await agreed({ title, text, act: "Unload" })) await tell("unload", name, { report });
}

/** Loads or unloads a model, and shows what became of it. */
export async function tell(verb, name, { report = page.report } = {}) {
  doing = { name, state: verb === "load" ? "loading" : "draining" };
  page.clear();
  showChosen();
  refreshSoon();
  try {
    await ask(`/admin/${verb}/${nameInPath(name)}`, { method: "POST" });
  } catch (error) {
    report(error);
  }
  doing = null;
  await refreshModels({ quiet: true }).catch(report);
}
