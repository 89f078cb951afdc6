// Scoring: several continuations of a text, and how likely the model finds each.

import { askJson } from "./api.js";
import { announce, byId, make, seconds } from "./dom.js";
import { currentModel } from "./models.js";
import { Runner } from "./run.js";

export function scoreMode(panel) {
  const runner = new Runner(panel.querySelector(".composer"));
  const [prompt, lines, space] = ["score-prompt", "score-lines", "score-space"].map(byId);
  const opening = panel.querySelector(".opening");

  function draft() {
    const continuations = lines.value.split("\n").filter((line) => line.trim());
    if (!prompt.value || !continuations.length) return null;
    const between = space.checked ? " " : "";
    return {
      path: "/loglikelihood",
      body: {
        model: currentModel(),
        prompts: continuations.map(() => prompt.value),
        continuations: continuations.map((line) => between + line),
      },
    };
  }

  async function send() {
    const request = draft();
    if (runner.busy) return;
    if (!request) {
      runner.complain("Write a prompt and at least one continuation.");
      return;
    }
    const begun = performance.now();
    const outcome = await runner.run(async (signal) => {
      runner.facts.textContent = "Waiting for the scores";
      const { path, body } = request;
      show(body.continuations, await askJson(path, { method: "POST", body, signal }));
    });
    const took = seconds(performance.now() - begun);
    runner.facts.textContent = { done: `${request.body.continuations.length} scored in ${took}`, stopped: "Stopped" }[outcome] ?? "";
  }

  function show(continuations, { ll, num_tokens, is_greedy }) {
    opening.hidden = true;
    byId("score-table").hidden = false;
    const best = Math.max(...ll);
    const whole = ll.reduce((sum, each) => sum + Math.exp(each - best), 0);
    const ranked = continuations
      .map((text, index) => ({
        text,
        sum: ll[index],
        tokens: num_tokens[index],
        greedy: is_greedy[index],
        share: Math.exp(ll[index] - best) / whole,
      }))
      .sort((a, b) => b.sum - a.sum);
    byId("score-table").tBodies[0].replaceChildren(...ranked.map(rowOf));
    announce(`The likeliest is ${ranked[0].text.trim()}, at ${percent(ranked[0].share)} of these.`);
  }

  for (const example of opening.querySelectorAll("button")) {
    example.addEventListener("click", () => {
      const [beginning, ends] = example.textContent.trim().split(": ");
      prompt.value = beginning;
      lines.value = ends.split(", ").join("\n");
      send();
    });
  }
  return { runner, draft, send };
}

function rowOf({ text, sum, tokens, greedy, share }) {
  const name = make("th", { scope: "row" }, text.trim());
  if (greedy) name.append(" ", make("small", { title: "each of its tokens is the likeliest at its place" }, "greedy"));
  const bar = make("div", { class: "meter" }, make("span", { class: "number" }, percent(share)));
  bar.style.setProperty("--share", share.toFixed(4));
  return make(
    "tr",
    {},
    name,
    make("td", { class: "number" }, signed(sum)),
    make("td", { class: "number" }, signed(sum / Math.max(tokens, 1)), " ", make("small", {}, `× ${tokens}`)),
    make("td", { class: "share" }, bar),
  );
}

const signed = (number) => number.toFixed(3).replace("-", "−");
const percent = (share) => (share >= 0.001 ? `${(share * 100).toFixed(1)} %` : "< 0.1 %");
