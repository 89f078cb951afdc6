// One mode's requests, one at a time: its button sends and stops, its facts show timings, its notice shows errors.

import { ApiError, streamed } from "./api.js";
import { onceBack } from "./contact.js";
import { make, seconds } from "./dom.js";

export class Runner {
  #abort = null;

  /** `composer` is the form at the bottom of a panel. */
  constructor(composer) {
    this.form = composer;
    this.button = composer.querySelector(".go");
    this.notice = composer.querySelector(".notice");
    this.facts = composer.querySelector(".facts");
    this.label = this.button.textContent;
  }

  get busy() {
    return this.#abort !== null;
  }

  stop() {
    this.#abort?.abort();
  }

  /** Runs `work(signal)`; returns how it ended: "done", "stopped", or "failed", with the reason in the notice. */
  async run(work) {
    this.#abort = new AbortController();
    this.#show("Stop");
    this.complain("");
    this.facts.textContent = "Waiting for the first token";
    try {
      await work(this.#abort.signal);
      return "done";
    } catch (error) {
      if (error.name === "AbortError") return "stopped";
      this.report(error);
      return "failed";
    } finally {
      this.#abort = null;
      this.#show(this.label);
    }
  }

  /** Streams a request. Passes each event to `take`, which returns whether it had text. Shows the speed at the end.
   *  Returns {outcome, reason}: how the request ended, as `run` says, and why the model did, if it said so. */
  async stream({ path, body }, take) {
    const timing = { begun: performance.now(), events: 0 };
    const outcome = await this.run(async (signal) => {
      for await (const event of streamed(path, body, signal)) {
        if (event.usage) timing.usage = event.usage;
        timing.ended = event.choices[0]?.finish_reason ?? timing.ended;
        if (!take(event)) continue;
        timing.last = performance.now();
        timing.first ??= timing.last;
        if (timing.events++ === 0) this.facts.textContent = `${seconds(timing.first - timing.begun)} to the first token`;
      }
    });
    this.facts.textContent = factsOf(timing, outcome).join(" · ");
    return { outcome, reason: timing.ended };
  }

  /** The request that `build` returns; null, after showing the error, if a parameter is invalid. */
  built(build) {
    try {
      return build();
    } catch (error) {
      this.complain(error.message);
      return null;
    }
  }

  /** Shows an error. That the server is lost is no longer shown once it is back. */
  report(error) {
    this.complain(error instanceof ApiError ? error.message : `Error in this page: ${error.message}`);
    const shown = this.notice.firstChild;
    if (error.isLost) onceBack(() => shown.isConnected && this.complain(""));
  }

  complain(sentence) {
    this.notice.replaceChildren();
    if (!sentence) return;
    const close = make("button", { type: "button", class: "quiet", "aria-label": "Dismiss", textContent: "✕" });
    close.addEventListener("click", () => this.complain(""));
    this.notice.append(make("p", {}, sentence), close);
  }

  #show(label) {
    this.button.textContent = label;
    this.form.classList.toggle("busy", this.busy);
    this.form.dispatchEvent(new Event("busychange", { bubbles: true }));
  }
}

// Explanations of finish reasons that a user should know about.
const ENDS = {
  __proto__: null,
  length: "stopped: max tokens reached",
  repetition: "stopped: the answer was repeating itself",
};

function factsOf({ begun, first, last, events, usage, ended }, outcome) {
  if (first === undefined) return outcome === "stopped" ? ["Stopped"] : [];
  const facts = [`${seconds(first - begun)} to the first token`];
  const made = usage?.completion_tokens ?? events;
  if (made > 1 && last > first) facts.push(`${(((made - 1) * 1000) / (last - first)).toFixed(1)} tokens/s`);
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    facts.push(`${usage.prompt_tokens} in${cached ? ` (${cached} cached)` : ""}`, `${usage.completion_tokens} out`);
  }
  if (outcome !== "done") facts.push(outcome === "stopped" ? "stopped" : "broken off");
  else if (ENDS[ended]) facts.push(ENDS[ended]);
  return facts;
}
