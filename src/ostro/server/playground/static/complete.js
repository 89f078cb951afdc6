// Completion: the model continues a text, shown token by token.

import { announce, byId, following, oncePerFrame } from "./dom.js";
import { currentModel } from "./models.js";
import { requestParameters } from "./params.js";
import { Runner } from "./run.js";
import { remember, setting } from "./store.js";
import { TokenRow } from "./tokens.js";

export function completeMode(panel) {
  const runner = new Runner(panel.querySelector(".composer"));
  const input = byId("complete-input");
  const sheet = byId("complete-sheet");
  const opening = panel.querySelector(".opening");
  const row = new TokenRow(byId("complete-tokens"));

  function draft() {
    if (!input.value) return null;
    return {
      path: "/v1/completions",
      body: {
        model: currentModel(),
        prompt: input.value,
        ...requestParameters("complete"),
        stream: true,
        stream_options: { include_usage: true },
      },
    };
  }

  async function send() {
    if (runner.busy) return;
    const request = runner.built(draft);
    if (!request) return;
    opening.hidden = true;
    byId("complete-document").hidden = false;
    byId("complete-given").textContent = request.body.prompt;
    row.clear();
    const come = [];
    const draw = () => following(sheet, () => come.splice(0).forEach((choice) => row.add(choice.text, choice.logprobs)));
    const drawSoon = oncePerFrame(draw);
    const { outcome } = await runner.stream(request, (event) => {
      const choice = event.choices[0];
      if (!choice) return false;
      come.push(choice);
      drawSoon();
      return Boolean(choice.text || choice.logprobs?.tokens.length);
    });
    draw();
    row.end();
    if (outcome !== "failed") announce(`Completion: ${row.text}`);
  }

  for (const example of opening.querySelectorAll("button")) {
    example.addEventListener("click", () => {
      input.value = example.textContent.trim();
      send();
    });
  }
  const values = setting("completing", {});
  return { runner, draft, send, parameters: () => ({ values, changed: () => remember("completing", values) }) };
}
