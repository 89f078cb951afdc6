// Assembles the page: modes, tabs, keyboard shortcuts. Each part has its own module.

import { chatMode } from "./chat.js";
import { buildCode, openCode } from "./code.js";
import { completeMode } from "./complete.js";
import { onceBack } from "./contact.js";
import { byId, hasKeyboard } from "./dom.js";
import { buildKey } from "./key.js";
import { isComposing, sends } from "./keys.js";
import { watchLive } from "./live.js";
import { buildMenu } from "./menu.js";
import { buildModelsView } from "./models-view.js";
import { buildModels, onModel, refreshModels, refreshRights, refreshSoon } from "./models.js";
import { buildParameters, showModel, showParametersOf, showValues } from "./params.js";
import { buildQuestion } from "./question.js";
import { scoreMode } from "./score.js";
import { remember, setting } from "./store.js";
import { buildTheme } from "./theme.js";
import { hideAlternatives } from "./tokens.js";

const MODES = ["chat", "complete", "score"];
const isMac = /Mac|iPhone|iPad/.test(navigator.platform);

let current = "chat";
let isBuilt = false;
const modes = {
  chat: chatMode(byId("chat"), showParameters),
  complete: completeMode(byId("complete")),
  score: scoreMode(byId("score")),
};

/** Shows the values of the current mode's parameters: a conversation has its own. */
function showParameters() {
  if (!isBuilt) return;
  const { values, changed } = modes[current].parameters?.() ?? { values: {}, changed: () => {} };
  showValues(values, changed);
}

function choose(name) {
  current = MODES.includes(name) ? name : "chat";
  document.body.dataset.mode = current;
  for (const each of MODES) {
    const tab = byId(`tab-${each}`);
    tab.setAttribute("aria-selected", String(each === current));
    tab.tabIndex = each === current ? 0 : -1;
    byId(each).hidden = each !== current;
  }
  hideAlternatives();
  // Text that arrived while it was hidden was not scrolled into view.
  const sheet = byId(current).querySelector(".sheet");
  if (modes[current].runner.busy) sheet.scrollTop = sheet.scrollHeight;
  showParameters();
  showParametersOf(current);
  for (const node of document.querySelectorAll(".keys")) node.hidden = !node.dataset.for.split(" ").includes(current);
  remember("mode", current);
}

function buildTabs() {
  MODES.forEach((name, index) => {
    const tab = byId(`tab-${name}`);
    tab.addEventListener("click", () => choose(name));
    tab.addEventListener("keydown", (event) => {
      const to = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: MODES.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      const next = MODES.at(to % MODES.length);
      choose(next);
      byId(`tab-${next}`).focus();
    });
  });
}

function buildComposers() {
  for (const [name, mode] of Object.entries(modes)) {
    const panel = byId(name);
    panel.querySelector("form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (mode.runner.busy) mode.runner.stop();
      else mode.send();
      focusInput();
    });
    panel.querySelector("[data-act=code]").addEventListener("click", () => openCode(mode.draft));
    panel.querySelector(".sheet").addEventListener("scroll", hideAlternatives, { passive: true });
  }
}

function focusInput() {
  if (hasKeyboard()) byId(current).querySelector(".composer textarea").focus({ preventScroll: true });
}

document.addEventListener("keydown", (event) => {
  if (isComposing(event) || document.querySelector("dialog[open], :popover-open")) return;
  if (sends(event)) {
    event.preventDefault();
    modes[current].send();
  } else if (event.key === "Escape") {
    hideAlternatives();
    modes[current].runner.stop();
  }
});

const report = (error) => modes[current].runner.report(error);

async function connect() {
  try {
    await refreshModels();
    for (const mode of Object.values(modes)) mode.runner.complain("");
    await refreshRights();
  } catch (error) {
    report(error);
    if (error.isLost) onceBack(connect);
  }
}

buildParameters();
isBuilt = true;
buildTabs();
buildComposers();
buildCode();
buildMenu();
buildQuestion();
buildTheme();
buildModels({ report, clear: () => modes[current].runner.complain("") });
buildModelsView();
buildKey(connect);
onModel(showModel);
byId("send-key").textContent = isMac ? "⌘" : "Ctrl";
choose(setting("mode", "chat"));
focusInput();
connect();
// A request may load one model and evict another; a restarted server may have other models.
document.addEventListener("busychange", refreshSoon);
watchLive(refreshSoon);
