// The chat: each message sends everything before it on its branch of the conversation.

import { partsOfTurn } from "./answer.js";
import { conversationOf, forget, keep, onChangeElsewhere, readArchive } from "./archive.js";
import { namesOf, resultsForm } from "./calls.js";
import { Conversation, messagesOf } from "./conversation.js";
import { takeDelta } from "./deltas.js";
import { announce, byId, following, hasKeyboard, make, oncePerFrame } from "./dom.js";
import { continuing, endOf } from "./endings.js";
import { Files } from "./files.js";
import { buildHistory, remove, showHistory } from "./history.js";
import { currentModel } from "./models.js";
import { requestParameters, systemPrompt } from "./params.js";
import { Runner } from "./run.js";
import { openConversation, remember, rememberOpen, setting } from "./store.js";
import { TurnView } from "./turn.js";

const SAVE_MS = 300;

/** `showParameters()` shows the parameters of the conversation that is open. */
export function chatMode(panel, showParameters) {
  const runner = new Runner(panel.querySelector(".composer"));
  const input = byId("chat-input");
  const log = byId("chat-log");
  const list = byId("chat-turns");
  const opening = panel.querySelector(".opening");
  const files = new Files(panel, { complain: (sentence) => runner.complain(sentence) });
  let conversation = new Conversation({ settings: setting("draft", {}) });
  // {conversation, turn} of the answer being generated, which continues while another conversation is shown.
  let coming = null;
  let isLeaving = false;
  let views = [];
  // {turn, node} of the form for the results of the last answer's calls.
  let asking = null;
  // A conversation whose parameters have changed, and when they will be stored: not at every key.
  let unsaved = null;
  let saving = 0;

  // --- requests ------------------------------------------------------------------------------------------------------

  /** Throws Error with a sentence for the user if a parameter is invalid. */
  function requestOf(turns) {
    const system = systemPrompt();
    const messages = turns.flatMap(messagesOf);
    return {
      path: "/v1/chat/completions",
      body: {
        model: currentModel(),
        messages: system ? [{ role: "system", content: system }, ...messages] : messages,
        ...requestParameters("chat"),
        stream: true,
        stream_options: { include_usage: true },
      },
    };
  }

  /** The request for the message being written, or else the last request. */
  function draft() {
    const { path } = conversation;
    if (input.value.trim() || files.current.length) return requestOf([...path, { role: "user", content: input.value, files: files.current }]);
    const last = path.findLastIndex((turn) => turn.role !== "assistant");
    return last < 0 ? null : requestOf(path.slice(0, last + 1));
  }

  async function send() {
    const text = input.value;
    if (runner.busy || !(text.trim() || files.current.length)) return;
    input.value = "";
    const sent = files.take();
    const within = conversation;
    const asked = within.add(within.path.at(-1), { role: "user", content: text, ...(sent.length && { files: sent }) });
    if ((await answer(asked)) || within !== conversation) return;
    // Put the message back into the input field.
    withdraw(asked);
    input.value = [text, input.value].filter(Boolean).join("\n");
    files.put(sent);
    if (hasKeyboard()) input.focus();
  }

  /** Removes a message that got no answer. */
  function withdraw(turn) {
    conversation.remove(turn);
    if (conversation.turns.length) keep(conversation);
    else {
      forget(conversation);
      remember("draft", conversation.settings);
    }
    showHistory();
    show();
  }

  /** Requests an answer to a turn; returns whether any of it arrived. */
  async function answer(asked) {
    const within = conversation;
    const before = within.shown[asked.id];
    const request = runner.built(() => requestOf(within.pathTo(asked)));
    if (!request) return false;
    const turn = within.addAnswer(asked, { role: "assistant", content: "", model: request.body.model });
    remember("draft", {});
    return receive(request, {
      within,
      turn,
      giveUp() {
        within.remove(turn);
        if (before) within.shown[asked.id] = before;
      },
    });
  }

  /** Requests the rest of an answer that ended early. */
  async function proceed(turn) {
    if (runner.busy) return;
    const within = conversation;
    const request = runner.built(() => continuing(requestOf(within.pathTo(turn))));
    if (!request) return;
    focusLog();
    await receive(request, { within, turn });
  }

  /** Adds what arrives to a turn; returns whether anything did, after `giveUp` if not. */
  async function receive(request, { within, turn, giveUp = () => {} }) {
    coming = { conversation: within, turn };
    store(within);
    show();
    log.scrollTop = log.scrollHeight;
    const draw = oncePerFrame(() => following(log, () => coming?.turn === turn && viewOf(turn)?.grow()));
    const clock = thoughtClock(turn);
    let came = false;
    const { outcome, reason } = await runner.stream(request, (event) => {
      if (!takeDelta(turn, event.choices[0]?.delta ?? {})) return false;
      came = true;
      clock();
      draw();
      return true;
    });
    coming = null;
    came ||= outcome === "done";
    if (!came) giveUp();
    else turn.ended = outcome === "failed" && isLeaving ? "left" : endOf(outcome, reason);
    // It may have been deleted in the meantime.
    if (conversationOf(within.id) === within) store(within);
    following(log, show);
    if (came) announce(outcome === "done" ? spoken(turn) : "The answer was broken off.");
    if (asking && document.activeElement === input && !input.value) asking.node.querySelector("textarea").focus();
    return came;
  }

  // --- actions on turns ----------------------------------------------------------------------------------------------

  const acts = {
    complain: (sentence) => runner.complain(sentence),

    regenerate(turn) {
      if (runner.busy) return;
      focusLog();
      const asked = turn.role === "assistant" ? conversation.pathTo(turn).at(-2) : turn;
      if (asked) answer(asked);
      else runner.complain("There is no message that this would answer.");
    },

    proceed,

    edit(turn, changes) {
      if (runner.busy) return;
      const { id, parent, ...rest } = turn;
      const isSame = JSON.stringify({ ...turn, ...changes }) === JSON.stringify(turn);
      if (isSame) {
        if (turn.role !== "assistant") acts.regenerate(turn);
        return;
      }
      const edited = conversation.add(conversation.pathTo(turn).at(-2), { ...rest, ...changes });
      focusLog();
      if (edited.role !== "assistant") answer(edited);
      else store(conversation);
      show();
    },

    callsBefore: (turn) => conversation.pathTo(turn).at(-2)?.tool_calls ?? [],

    step(turn, by) {
      const versions = conversation.versionsOf(turn);
      const next = versions[versions.indexOf(turn) + by];
      if (runner.busy || !next) return;
      conversation.show(next);
      store(conversation);
      show();
      showParameters();
      viewOf(next)?.focusStep(by);
    },
  };

  /** Sends the results of an answer's calls, for the model to continue with. */
  async function sendResults(turn, results) {
    if (runner.busy) return;
    const within = conversation;
    const told = within.add(turn, { role: "tool", results });
    focusLog();
    if ((await answer(told)) || within !== conversation) return;
    withdraw(told);
    askForResults(results);
  }

  // The button that was pressed may be gone.
  const focusLog = () => log.focus({ preventScroll: true });

  // --- display -------------------------------------------------------------------------------------------------------

  const viewOf = (turn) => views.find((view) => view.turn === turn);

  /** Draws the chosen branch; turns that are already shown stay as they are. */
  function show() {
    const { path } = conversation;
    const same = path.findIndex((turn, index) => views[index]?.turn !== turn);
    const kept = same < 0 ? path.length : same;
    for (const stale of views.splice(kept)) stale.node.remove();
    for (const turn of path.slice(kept)) {
      const view = new TurnView(turn, acts);
      views.push(view);
      list.append(view.node);
      if (turn !== coming?.turn) view.finish();
    }
    for (const view of views) {
      const versions = conversation.versionsOf(view.turn);
      view.count(versions.indexOf(view.turn), versions.length);
      if (view.turn === coming?.turn) view.grow();
      else if (view.node.classList.contains("coming")) view.finish();
      view.offerMore(view === views.at(-1));
    }
    askForResults();
    nameModels();
    lock();
    opening.hidden = path.length > 0;
  }

  /** Shows the form for the results of the last answer's calls, if it has any. Keeps what is being typed there. */
  function askForResults(results = null) {
    const turn = views.at(-1)?.turn;
    const calls = (turn !== coming?.turn && turn?.tool_calls) || [];
    if (asking?.turn === turn && calls.length && !results) return;
    asking?.node.remove();
    asking = null;
    if (!calls.length) return;
    const form = resultsForm(calls, { results: results ?? [], send: (given) => sendResults(turn, given) });
    asking = { turn, node: make("li", { class: "tool" }, make("h3", { class: "unseen" }, "Result"), form) };
    list.append(asking.node);
  }

  /** Names the model only where it differs from the previous answer's. */
  function nameModels() {
    let before = views.find((view) => view.turn.model)?.turn.model;
    for (const view of views.filter(({ turn }) => turn.model)) {
      view.model.hidden = view.turn.model === before;
      before = view.turn.model;
    }
  }

  /** Allows one answer at a time. */
  function lock() {
    for (const button of list.querySelectorAll(".changes")) button.disabled = runner.busy;
  }

  function open(next, turn = null) {
    conversation = next ?? new Conversation();
    if (turn) conversation.reveal(turn);
    if (!conversation.turns.length) remember("draft", conversation.settings);
    rememberOpen(conversation.id);
    views = [];
    asking = null;
    list.replaceChildren();
    runner.complain("");
    if (!coming) runner.facts.textContent = "";
    show();
    log.scrollTop = log.scrollHeight;
    if (turn) viewOf(turn)?.node.scrollIntoView({ block: "center" });
    showHistory();
    showParameters();
    if (hasKeyboard()) input.focus({ preventScroll: true });
  }

  // --- storage -------------------------------------------------------------------------------------------------------

  function store(changed) {
    const stored = keep(changed);
    rememberOpen(conversation.id);
    showHistory();
    if (!stored) runner.complain("The browser cannot store this conversation: its storage is full or blocked. Export it, or delete others.");
  }

  /** The values of the parameters, which belong to the conversation; before its first message they are a draft. */
  function parameters() {
    const within = conversation;
    const changed = () => {
      if (unsaved !== within) saveParameters();
      unsaved = within;
      clearTimeout(saving);
      saving = setTimeout(saveParameters, SAVE_MS);
    };
    return { values: within.settings, changed };
  }

  function saveParameters() {
    clearTimeout(saving);
    const changed = unsaved;
    unsaved = null;
    // It may have been deleted in the meantime.
    if (changed && conversationOf(changed.id) === changed) keep(changed);
    else if (changed === conversation && !changed.turns.length) remember("draft", changed.settings);
  }

  /** Called when a conversation has been deleted. */
  function drop(gone) {
    if (coming?.conversation === gone) runner.stop();
    if (conversation === gone) open(null);
  }

  async function clear() {
    if (conversation.turns.length) await remove(conversation);
    else open(null);
  }

  for (const example of opening.querySelectorAll("button")) {
    example.addEventListener("click", () => {
      input.value = example.textContent.trim();
      send();
      if (hasKeyboard()) input.focus({ preventScroll: true });
    });
  }
  panel.querySelector("[data-act=clear]").addEventListener("click", clear);
  runner.form.addEventListener("busychange", lock);
  // Store the part of an answer that has arrived before the page closes.
  addEventListener("pagehide", () => {
    saveParameters();
    // The browser breaks the answer off while it closes the page.
    isLeaving = true;
    if (!coming) return;
    coming.turn.ended = "left";
    keep(coming.conversation);
  });
  addEventListener("pageshow", () => (isLeaving = false));

  readArchive();
  buildHistory({ current: () => conversation, open, forgotten: drop, complain: acts.complain });
  onChangeElsewhere((id) => {
    if (id === conversation.id && coming?.conversation !== conversation) open(conversationOf(id) ?? conversation);
    showHistory();
  });
  const last = conversationOf(openConversation());
  if (last) open(last);
  return { runner, draft, send, parameters };
}

/** A function to call whenever part of the turn has arrived: it records how long the model has reasoned. */
function thoughtClock(turn) {
  let begun = null;
  let isOver = false;
  const earlier = turn.thought_ms ?? 0;
  return () => {
    if (isOver) return;
    const { thinking, said } = partsOfTurn(turn);
    isOver = !thinking && Boolean(said || turn.tool_calls);
    if (!thinking) return;
    begun ??= performance.now();
    turn.thought_ms = earlier + Math.round(performance.now() - begun);
  };
}

/** The text that screen readers announce for an answer. */
function spoken(turn) {
  const { said } = partsOfTurn(turn);
  const names = namesOf(turn.tool_calls ?? []);
  const called = names.length ? `Call of ${names.join(", ")}. Type the result.` : "";
  return [said || !called ? `Answer: ${said}` : "", called].filter(Boolean).join(" ");
}
