// The dialog that lists what can be loaded: the server's models, those with a short name, and the cache, with sizes,
// plans and progress. What it may show and do depends on the key.

import { askJson } from "./api.js";
import { byId, make } from "./dom.js";
import { canManage, cardsNow, labelOf, nameInPath, pick, refreshModels, tell, unload } from "./models.js";

const AGAIN_MS = 1000;
// More are found by their name. Each plan reads the headers of some files.
const MOST_ROWS = 100;
const MOST_PLANS = 20;

const dialog = byId("models-dialog");
const query = byId("models-find");
const note = byId("models-note");
// By name: figures of /admin/stats, and plans or the reason why there is none.
let stats = new Map();
let plans = new Map();
let known = null;
let timer = 0;
let drawn = "";

export function buildModelsView() {
  byId("models-open").addEventListener("click", open);
  dialog.querySelector("[data-act=close]").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => clearTimeout(timer));
  query.addEventListener("input", draw);
  byId("models-key").addEventListener("click", () => {
    dialog.close();
    byId("key-open").click();
  });
}

async function open() {
  plans = new Map();
  known = null;
  query.value = "";
  note.textContent = "";
  dialog.showModal();
  query.focus();
  draw();
  await refresh();
  if (!canManage()) return;
  try {
    known = await askJson("/admin/available", { quiet: true });
  } catch (error) {
    note.textContent = error.message;
  }
  draw();
  await planAll();
}

/** Fetches the states, and again and again while they change. */
async function refresh() {
  clearTimeout(timer);
  try {
    await refreshModels({ quiet: true });
    if (canManage()) stats = new Map((await askJson("/admin/stats", { quiet: true })).models.map((each) => [each.id, each]));
  } catch (error) {
    note.textContent = error.message;
  }
  if (!dialog.open) return;
  draw();
  timer = setTimeout(refresh, AGAIN_MS);
}

// --- plans ----------------------------------------------------------------------------------------------------------

/** Plans what is on this machine or belongs to this server, one after the other. */
async function planAll() {
  const served = cardsNow().filter((card) => !card.parent).slice(0, MOST_PLANS);
  const here = known?.short_names.filter((each) => each.here) ?? [];
  for (const name of [...served.map((card) => card.id), ...here.map((each) => each.name)]) {
    if (!dialog.open) return;
    if (!plans.has(name)) await planOne(name);
  }
}

async function planOne(name) {
  if (!plans.has(name)) plans.set(name, null);
  draw();
  try {
    plans.set(name, await askJson(`/admin/plan/${nameInPath(name)}`, { quiet: true }));
  } catch (error) {
    // An earlier plan still says more than an error.
    if (!plans.get(name)) plans.set(name, { unknown: error.message });
  }
  draw();
}

// --- display --------------------------------------------------------------------------------------------------------

function draw() {
  const words = query.value.toLowerCase().split(/\s+/).filter(Boolean);
  const isWanted = (...texts) => words.every((word) => texts.join(" ").toLowerCase().includes(word));
  const served = cardsNow().filter((card) => isWanted(card.id));
  const short = known?.short_names.filter((each) => isWanted(each.name, each.description)) ?? [];
  const cached = known?.cached.filter((each) => isWanted(each.name, each.source)) ?? [];
  byId("models-rights").hidden = canManage();
  byId("models-more").textContent =
    served.length > MOST_ROWS ? `And ${served.length - MOST_ROWS} more: find them by their names.` : "";
  const wanted = JSON.stringify([words, canManage(), served.map((card) => [card, labelOf(card), stats.get(card.id)]), short, cached, [...plans]]);
  if (wanted === drawn) return;
  drawn = wanted;
  fill("models-served", served.slice(0, MOST_ROWS).map(servedRow), "This server has no such model.");
  fill("models-short", short.map(shortRow), "No short name has these words.");
  fill("models-cached", cached.map(cachedRow), "The cache is empty, or holds nothing of that name.");
  byId("models-known").hidden = known === null;
}

/** Draws rows anew; the focus stays on the button that has it. */
function fill(id, rows, otherwise) {
  const list = byId(id);
  const focused = list.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  list.replaceChildren(...(rows.length ? rows : [make("li", { class: "aside-note" }, otherwise)]));
  if (focused) (list.querySelector(`[data-key="${CSS.escape(focused)}"]:not(:disabled)`) ?? query).focus();
}

function servedRow(card) {
  const { id, state, parent } = card;
  const told = stats.get(id);
  const row = rowOf(id, make("span", { class: "state" }, dotOf(state), labelOf(card)));
  const outlook = plans.get(id);
  const uses = state === "ready" && told?.bytes ? `uses ${memory(told.device_bytes || told.bytes)}` : "";
  row.append(
    factsLine(parent ? `an adapter of ${parent}` : "", sizeOf(outlook), sourceOf(outlook)),
    factsLine(uses, told?.pinned ? "pinned" : "", ...planOf(outlook, plans.has(id))),
  );
  if (state === "fetching") row.append(...progressOf(id, told));
  if (state === "loading") row.append(make("progress", { "aria-label": `Loading ${id}` }));
  if (told?.failure) row.append(make("p", { class: "flaw" }, told.failure));
  row.append(make("p", { class: "actions" }, ...servedActions(card)));
  return row;
}

function servedActions({ id, state, parent }) {
  const use = button("Use", id, () => {
    pick(id);
    dialog.close();
  });
  if (!canManage()) return [use];
  const isLoaded = ["ready", "draining"].includes(state);
  const isElsewhere = plans.get(id)?.here === false;
  const load = button(isElsewhere ? "Download and load" : "Load", id, () => act("load", id));
  const leave = button(state === "fetching" ? "Cancel" : "Unload…", id, () => act("unload", id));
  const acts = [use];
  if (state === "available" || state === "failed") acts.push(load);
  else if (isLoaded || state === "fetching") acts.push(leave);
  leave.disabled = state === "draining";
  if (!parent && !plans.has(id)) acts.push(planButton(id));
  return acts;
}

function shortRow({ name, description, licence, bytes, here, sources }) {
  const row = rowOf(name, make("span", { class: "state" }, here ? "on this machine" : "not downloaded"));
  const outlook = plans.get(name);
  row.append(factsLine(description, licence), factsLine(sizeOf(outlook) || size(bytes), sources));
  if (plans.has(name)) row.append(factsLine(...planOf(outlook, true)));
  if (!plans.has(name)) row.append(make("p", { class: "actions" }, planButton(name)));
  return row;
}

function cachedRow({ name, source, bytes, last_use: lastUse, in_use: isInUse }) {
  const row = rowOf(name, make("span", { class: "state" }, isInUse ? "in use" : ""));
  const used = lastUse ? `last used ${new Date(lastUse * 1000).toLocaleDateString("en", { dateStyle: "medium" })}` : "";
  row.append(factsLine(size(bytes), used, source));
  return row;
}

const rowOf = (name, ...rest) => make("li", {}, make("p", { class: "head" }, make("b", {}, name), ...rest));
const dotOf = (state) => make("span", { class: "dot", "data-state": state, "aria-hidden": "true" });
const planButton = (name) => button("Plan", name, () => planOne(name));

function button(label, name, act) {
  const full = `${label.replace("…", "")} ${name}`;
  const made = make("button", { type: "button", class: "quiet", "aria-label": full, "data-key": full }, label);
  made.addEventListener("click", act);
  return made;
}

const factsLine = (...facts) => make("p", { class: "facts" }, facts.filter(Boolean).join(" · "));
const sizeOf = (outlook) => (outlook?.bytes ? `${size(outlook.bytes)}${outlook.here ? "" : " to download"}` : "");

function sourceOf(outlook) {
  if (!outlook?.kind) return "";
  return outlook.kind === "path" ? outlook.source : `${outlook.kind}: ${outlook.source}`;
}

/** What a plan says, in words; or that it has been asked for and has not come yet. */
function planOf(outlook, isAsked) {
  if (!outlook) return isAsked ? ["planning…"] : [];
  const { plan } = outlook;
  if (!plan) return [outlook.unknown];
  const needed = `${memory(plan.total_bytes)} of ${memory(plan.memory)}`;
  const length = `${plan.max_seq_len.toLocaleString("en")} tokens`;
  return plan.fits ? [`fits: ${needed}`, length, plan.backend] : [`does not fit: needs ${needed}`, plan.backend];
}

function progressOf(id, told) {
  const bar = make("progress", { "aria-label": `Downloading ${id}` });
  if (!told?.fetch_bytes) return [bar];
  bar.max = told.fetch_bytes;
  bar.value = told.fetched_bytes;
  return [bar, factsLine(`${size(told.fetched_bytes)} of ${size(told.fetch_bytes)}`)];
}

async function act(verb, name) {
  note.textContent = "";
  const report = (error) => (note.textContent = error.message);
  if (verb === "load") await tell("load", name, { report });
  else if (stats.get(name)?.state === "fetching") await tell("unload", name, { report });
  else await unload(name, { report });
  await refresh();
  // What was downloaded is here now.
  if (verb === "load" && dialog.open && canManage()) await planOne(name);
}

const scaled = (bytes, base, units) => {
  const power = Math.min(Math.max(Math.floor(Math.log(bytes) / Math.log(base)), 0), units.length - 1);
  const value = bytes / base ** power;
  return `${value.toFixed(power && value < 100 ? 1 : 0)} ${units[power]}`;
};
// As `ostro models` and `ostro plan` write them.
const size = (bytes) => (bytes ? scaled(bytes, 1000, ["B", "kB", "MB", "GB", "TB"]) : "0 B");
const memory = (bytes) => (bytes ? scaled(bytes, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]) : "0 B");
