// Whether the server can be reached again, after a request found that it cannot.

import { urlOf } from "./api.js";

const FIRST_MS = 500;
const LONGEST_MS = 10_000;
const PATIENCE_MS = 5000;

let waiting = [];
let timer = 0;
let pause = FIRST_MS;

/** Calls back once the server answers, whatever it says. Asks it again and again, with growing pauses. */
export function onceBack(listener) {
  waiting.push(listener);
  if (waiting.length === 1) askAgain();
}

function askAgain() {
  pause = FIRST_MS;
  timer = setTimeout(look, pause);
}

async function look() {
  clearTimeout(timer);
  try {
    await fetch(urlOf("/healthz"), { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
  } catch {
    if (!waiting.length) return;
    pause = Math.min(pause * 2, LONGEST_MS);
    timer = setTimeout(look, pause);
    return;
  }
  const all = waiting;
  waiting = [];
  for (const listener of all) listener();
}

// Sooner, if the network or the reader is back.
const sooner = () => {
  if (waiting.length && document.visibilityState === "visible") look();
};
addEventListener("online", sooner);
document.addEventListener("visibilitychange", sooner);
