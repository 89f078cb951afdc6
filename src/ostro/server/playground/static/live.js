// The live panel: polls /metrics once a second while the page is visible.

import { ask } from "./api.js";
import { byId, seconds } from "./dom.js";
import { readMetrics } from "./metrics.js";
import { Sparkline } from "./sparkline.js";
import { currentKey } from "./store.js";

const EVERY_MS = 1000;
const PATIENCE_MS = 5000;
// Speeds are averaged over two samples, which is steadier than one.
const SPAN = 2;

const gauges = {};
let looks = [];
let lastFirstToken = null;
let refusedKey = null;
let onContact = null;

/** Calls `listener` when the server stops responding, and when it responds again. */
export function watchLive(listener) {
  onContact = listener;
  for (const node of document.querySelectorAll("[data-gauge]")) {
    const name = node.dataset.gauge;
    gauges[name] = { value: node.querySelector("dd"), line: new Sparkline(name === "pages" || name === "hits" ? 1 : undefined) };
    node.append(gauges[name].line.node);
  }
  document.addEventListener("visibilitychange", () => {
    if (document.visibilityState === "visible") look();
  });
  look();
}

let looking = false;
async function look() {
  if (looking) return;
  looking = true;
  while (document.visibilityState === "visible") {
    await once();
    await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
  }
  looking = false;
  looks = [];
}

async function once() {
  // Do not keep retrying with a rejected key.
  if (refusedKey === currentKey()) return;
  refusedKey = null;
  let text = "";
  try {
    text = await (await ask("/metrics", { quiet: true, signal: AbortSignal.timeout(PATIENCE_MS) })).text();
    tell("");
  } catch (error) {
    looks = [];
    if (error.status === 401) refusedKey = currentKey();
    for (const gauge of Object.values(gauges)) gauge.value.textContent = "–";
    tell(error.status === 401 ? "These numbers need a key." : "No numbers: the server does not answer.");
    return;
  }
  looks = [...looks, { at: performance.now(), of: readMetrics(text) }].slice(-SPAN - 1);
  for (const [name, { words, value }] of Object.entries(reading(looks))) {
    gauges[name].value.textContent = words;
    gauges[name].line.add(value ?? 0);
  }
}

function tell(sentence) {
  const note = byId("live-note");
  if (note.textContent === sentence) return;
  note.hidden = !sentence;
  note.textContent = sentence;
  onContact();
}

function reading(looks) {
  const newest = looks.at(-1);
  const now = (name) => newest.of.get(name) ?? 0;
  const gained = (name, since) => now(name) - (since.of.get(name) ?? 0);
  const span = (newest.at - looks[0].at) / 1000;
  const speed = span ? Math.max(gained("ostro_sampled_tokens_total", looks[0]) / span, 0) : 0;
  noteFirstToken(looks, now, gained);
  const total = now("ostro_pages_total");
  const used = total - now("ostro_pages_free") - now("ostro_pages_cached");
  const queries = now("vllm:prefix_cache_queries_total");
  const hits = queries ? now("vllm:prefix_cache_hits_total") / queries : null;
  return {
    speed: { words: speed.toFixed(speed < 100 ? 1 : 0), value: speed },
    ttft: { words: lastFirstToken === null ? "–" : seconds(lastFirstToken * 1000), value: lastFirstToken },
    running: counted(now("vllm:num_requests_running")),
    waiting: counted(now("vllm:num_requests_waiting")),
    pages: { words: total ? `${whole(used)} / ${whole(total)}` : "–", value: total ? used / total : 0 },
    hits: { words: hits === null ? "–" : `${Math.round(hits * 100)} %`, value: hits },
  };
}

function noteFirstToken(looks, now, gained) {
  const [sum, count] = ["vllm:time_to_first_token_seconds_sum", "vllm:time_to_first_token_seconds_count"];
  const before = looks.at(-2);
  const requests = before ? gained(count, before) : now(count);
  if (requests > 0 && (before || lastFirstToken === null)) lastFirstToken = (before ? gained(sum, before) : now(sum)) / requests;
}

const whole = (number) => Math.round(number).toLocaleString("en");
const counted = (number) => ({ words: whole(number), value: number });
