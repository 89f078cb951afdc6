// Consecutive tokens, coloured by probability, with the alternatives shown on hover and focus.

import { byId, make } from "./dom.js";

// Minimum probability of each colour, plainest first.
const STEPS = [0.9, 0.6, 0.3, 0.1, 0.02];

export class TokenRow {
  #tokens = [];
  #text = [];

  constructor(node) {
    this.node = node;
    node.addEventListener("keydown", (event) => this.#move(event));
    for (const name of ["pointerover", "focusin"]) node.addEventListener(name, (event) => this.#point(event));
    for (const name of ["pointerleave", "focusout"]) node.addEventListener(name, hideAlternatives);
    node.addEventListener("click", (event) => event.target.closest(".token")?.focus());
  }

  get text() {
    return this.#text.join("");
  }

  clear() {
    this.#tokens = [];
    this.#text = [];
    this.node.replaceChildren();
    hideAlternatives();
  }

  /** One event's part of a completion: its text, and the arrays of its tokens. */
  add(text, logprobs) {
    // Offsets count code points, JavaScript's strings count UTF-16 units.
    this.#text.push(...text);
    const begun = Math.max(this.#tokens.length - 1, 0);
    for (const [index, name] of (logprobs?.tokens ?? []).entries()) {
      const logprob = logprobs.token_logprobs[index];
      const top = Object.entries(logprobs.top_logprobs?.[index] ?? {}).sort((a, b) => b[1] - a[1]);
      const node = make("span", { class: `token ${tint(logprob)}`, role: "button", tabIndex: this.#tokens.length ? -1 : 0 });
      node.setAttribute("aria-label", spoken(name, logprob, top));
      this.#tokens.push({ name, logprob, top, node, at: logprobs.text_offset[index] });
      this.node.append(node);
    }
    this.#tokens.slice(begun).forEach((token, index) => {
      const piece = this.#text.slice(token.at, this.#tokens[begun + index + 1]?.at).join("");
      token.node.textContent = piece || (isLast(token, this.#tokens) ? "" : "·");
      token.node.classList.toggle("void", !piece);
    });
  }

  /** The last token may be an end token, which is not part of the text. */
  end() {
    const last = this.#tokens.at(-1);
    if (last && !last.node.textContent) last.node.textContent = "⏹";
  }

  #point(event) {
    const node = event.target.closest?.(".token");
    const token = node && this.#tokens.find((each) => each.node === node);
    if (!token) return;
    showAlternatives(token);
    if (event.type !== "focusin") return;
    this.node.querySelector("[tabindex='0']").tabIndex = -1;
    node.tabIndex = 0;
  }

  #move(event) {
    const at = this.#tokens.findIndex((token) => token.node === document.activeElement);
    const last = this.#tokens.length - 1;
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: last }[event.key];
    if (at < 0 || to === undefined || to < 0 || to > last) return;
    event.preventDefault();
    this.#tokens[to].node.focus();
  }
}

export function hideAlternatives() {
  byId("alternatives").hidden = true;
}

function showAlternatives({ name, logprob, top, node }) {
  const box = byId("alternatives");
  const rows = top.length ? top : logprob === null ? [] : [[name, logprob]];
  box.replaceChildren(
    ...rows.map(([text, each]) => {
      const row = make("div", { class: text === name ? "chosen" : "" });
      row.append(make("span", { class: "name" }, visible(text)), make("span", { class: "number" }, percent(each)));
      row.style.setProperty("--share", Math.exp(each).toFixed(4));
      return row;
    }),
  );
  if (!rows.length) return;
  box.hidden = false;
  const around = node.getClientRects()[0] ?? node.getBoundingClientRect();
  const below = around.bottom + 6 + box.offsetHeight < innerHeight;
  box.style.left = `${Math.max(8, Math.min(around.left, innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${below ? around.bottom + 6 : Math.max(8, around.top - box.offsetHeight - 6)}px`;
}

const isLast = (token, tokens) => token === tokens.at(-1);
const visible = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
const spokenName = (text) => text.replaceAll("\n", " new line ").trim() || (text ? "white space" : "nothing");

function tint(logprob) {
  if (logprob === null) return "p0";
  const probability = Math.exp(logprob);
  const step = STEPS.findIndex((least) => probability >= least);
  return `p${step < 0 ? STEPS.length : step}`;
}

function percent(logprob) {
  const share = Math.exp(logprob) * 100;
  return share >= 0.1 ? `${share.toFixed(1)} %` : "< 0.1 %";
}

function spoken(name, logprob, top) {
  const others = top.filter(([text]) => text !== name).map(([text, each]) => `${spokenName(text)} ${percent(each)}`);
  const own = `${spokenName(name)}${logprob === null ? "" : `, ${percent(logprob)}`}`;
  return others.length ? `${own}; instead: ${others.join(", ")}` : own;
}
