// A conversation: each message sends all that was said before it.

import { Answer, partsOf } from "./answer.js";
import { copied } from "./clipboard.js";
import { announce, byId, following, hasKeyboard, make, oncePerFrame } from "./dom.js";
import { currentModel } from "./models.js";
import { requestParameters, systemPrompt } from "./params.js";
import { Runner } from "./run.js";

export function chatMode(panel) {
  const runner = new Runner(panel.querySelector(".composer"));
  const input = byId("chat-input");
  const log = byId("chat-log");
  const list = byId("chat-turns");
  const opening = panel.querySelector(".opening");
  // Each {role, content, node}.
  let turns = [];

  const messages = (said) => {
    const system = systemPrompt();
    return [...(system ? [{ role: "system", content: system }] : []), ...said.map(({ role, content }) => ({ role, content }))];
  };

  const requestOf = (said) => ({
    path: "/v1/chat/completions",
    body: {
      model: currentModel(),
      messages: messages(said),
      ...requestParameters("chat"),
      stream: true,
      stream_options: { include_usage: true },
    },
  });

  /** What is written now, sent; or else what was sent last. */
  function draft() {
    if (input.value.trim()) return requestOf([...turns, { role: "user", content: input.value }]);
    const last = turns.findLastIndex((turn) => turn.role === "user");
    return last < 0 ? null : requestOf(turns.slice(0, last + 1));
  }

  async function send() {
    const text = input.value;
    if (runner.busy || !text.trim()) return;
    input.value = "";
    turns.push(shown("user", text));
    await answer();
  }

  async function answer() {
    opening.hidden = true;
    dropActions();
    const request = requestOf(turns);
    const prose = new Answer();
    const turn = shown("assistant", "", prose.node);
    turns.push(turn);
    log.scrollTop = log.scrollHeight;
    const draw = oncePerFrame(() => following(log, () => prose.update(turn.content)));
    turn.node.classList.add("coming");
    const outcome = await runner.stream(request, (event) => {
      const text = event.choices[0]?.delta.content ?? "";
      turn.content += text;
      if (text) draw();
      return Boolean(text);
    });
    if (!turns.includes(turn)) {
      runner.facts.textContent = "";
      return;
    }
    turn.node.classList.remove("coming");
    following(log, () => prose.finish(turn.content));
    if (turn.content || outcome === "done") {
      following(log, () => turn.node.append(actions()));
      announce(outcome === "done" ? `Answer: ${turn.content}` : "The answer was broken off.");
    } else {
      takeBack();
    }
  }

  /** Puts the last message back where it was written, and its answer away. */
  function takeBack() {
    while (turns.length && turns.at(-1).role !== "user") turns.pop().node.remove();
    const asked = turns.pop();
    asked?.node.remove();
    input.value = [asked?.content, input.value].filter(Boolean).join("\n");
    opening.hidden = turns.length > 0;
    if (turns.length) turns.at(-1).node.append(actions());
    input.focus();
  }

  function regenerate() {
    if (runner.busy) return;
    if (turns.at(-1).role === "assistant") turns.pop().node.remove();
    log.focus({ preventScroll: true });
    answer();
  }

  function clear() {
    turns = [];
    runner.stop();
    list.replaceChildren();
    opening.hidden = false;
    runner.complain("");
    runner.facts.textContent = "";
    input.focus();
  }

  function shown(role, content, body = make("div", { class: "prose said" }, content)) {
    const node = make("li", { class: role }, make("h3", { class: "unseen" }, role === "user" ? "You" : "Answer"), body);
    list.append(node);
    return { role, content, node };
  }

  function actions() {
    const copy = action("Copy", async () => {
      if (await copied(partsOf(turns.at(-1).content).said)) announce("Copied.");
      else runner.complain("The browser does not let this page copy. Mark the text and copy it with the keyboard.");
    });
    return make("p", { class: "actions" }, copy, action("Regenerate", regenerate), action("Edit", () => runner.busy || takeBack()));
  }

  const dropActions = () => list.querySelectorAll(".actions").forEach((node) => node.remove());

  for (const example of opening.querySelectorAll("button")) {
    example.addEventListener("click", () => {
      input.value = example.textContent.trim();
      send();
      if (hasKeyboard()) input.focus({ preventScroll: true });
    });
  }
  panel.querySelector("[data-act=clear]").addEventListener("click", clear);
  return { runner, draft, send };
}

function action(label, act) {
  const button = make("button", { type: "button", class: "quiet" }, label);
  button.addEventListener("click", act);
  return button;
}
