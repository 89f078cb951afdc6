// The parameters: sliders and fields, what they are set to, and what of it goes into a request.

import { byId, make } from "./dom.js";
import { remember, setting } from "./store.js";

// Models go further than a slider can be set with care; the field beside it takes what they do.
const SLIDER_TOKENS = 2048;
const MOST_TOKENS = 1_000_000;

// `always` ones are sent whatever they are, since a server may have defaults of its own; others if they differ.
const PARAMETERS = [
  { name: "system", label: "System prompt", kind: "text", modes: ["chat"], rows: 3, placeholder: "None" },
  { name: "max_tokens", label: "Max tokens", min: 1, max: SLIDER_TOKENS, step: 1, value: 256, always: true },
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, value: 0.7, always: true },
  { name: "top_p", label: "Top p", min: 0.01, max: 1, step: 0.01, value: 1 },
  { name: "top_k", label: "Top k", hint: "0 is all", min: 0, max: 200, step: 1, value: 0 },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, value: 0 },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.5, max: 2, step: 0.05, value: 1 },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1, value: 0 },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1, value: 0 },
  { name: "logprobs", label: "Alternatives", hint: "a token", min: 0, max: 20, step: 1, value: 5, modes: ["complete"] },
  { name: "seed", label: "Seed", kind: "seed", placeholder: "a fresh one" },
  { name: "stop", label: "Stop at", hint: "one text a line, \\n is a new line", kind: "text", rows: 2, placeholder: "None" },
];

const values = {};
const controls = {};

export function buildParameters() {
  const kept = setting("parameters", {});
  for (const each of PARAMETERS) {
    values[each.name] = initial(each);
    const control = each.kind ? field(each) : slider(each);
    controls[each.name] = control;
    byId("parameters-list").append(control.row);
    if (each.name in kept) control.show(accepted(each, kept[each.name]));
  }
  byId("parameters-reset").addEventListener("click", () => {
    for (const each of PARAMETERS) controls[each.name].show(initial(each));
    keep();
  });
}

/** Shows what matters in a mode. */
export function showParametersOf(mode) {
  for (const each of PARAMETERS) controls[each.name].row.hidden = !isFor(each, mode);
  byId("score-note").hidden = mode !== "score";
  byId("parameters-reset").hidden = mode === "score";
}

export const systemPrompt = () => values.system.trim();

/** What goes into a request of a mode, by the API's names. */
export function requestParameters(mode) {
  const body = {};
  for (const each of PARAMETERS) {
    if (each.name === "system" || !isFor(each, mode)) continue;
    const value = values[each.name];
    if (each.name === "stop") {
      const texts = value.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n").replaceAll("\\t", "\t"));
      if (texts.length) body.stop = texts;
    } else if (each.name === "seed") {
      if (value !== "") body.seed = Number(value);
    } else if (each.always || each.modes || value !== each.value) {
      body[each.name] = value;
    }
  }
  return body;
}

/** No slider should go further than the model can. */
export function limitTokens(most) {
  const { range, number, show } = controls.max_tokens;
  if (number.max === String(most ?? MOST_TOKENS)) return;
  range.max = Math.min(most ?? SLIDER_TOKENS, SLIDER_TOKENS);
  number.max = most ?? MOST_TOKENS;
  show(Math.min(values.max_tokens, most ?? MOST_TOKENS));
}

const isFor = (each, mode) => mode !== "score" && (!each.modes || each.modes.includes(mode));
const initial = (each) => each.value ?? "";
const keep = () => remember("parameters", { ...values });

function accepted(each, given) {
  if (each.kind === "text") return String(given);
  if (each.kind === "seed") return /^-?\d{1,15}$/.test(given) ? String(given) : "";
  const number = Number(given);
  if (given === "" || !Number.isFinite(number)) return each.value;
  // A number field may go beyond its slider where the API may, too.
  const most = each.name === "max_tokens" ? Number(controls.max_tokens.number.max) : each.max;
  const whole = each.step === 1 ? Math.round(number) : number;
  return Math.min(Math.max(whole, each.min), most);
}

function slider(each) {
  const id = `parameter-${each.name}`;
  const bounds = { min: each.min, max: each.max, step: each.step };
  const number = make("input", { type: "number", id, inputMode: "decimal", ...bounds });
  if (each.name === "max_tokens") number.max = MOST_TOKENS;
  const range = make("input", { type: "range", "aria-labelledby": `${id}-label`, ...bounds });
  const row = make("div", { class: "parameter" }, labelOf(each, id), number, range);
  const show = (value) => {
    values[each.name] = value;
    number.value = value;
    range.value = value;
    // Coloured from where it does nothing to where it is.
    const [from, to] = [each.always ? each.min : each.value, Number(range.value)].sort((a, b) => a - b);
    range.style.setProperty("--from", placed(range, from));
    range.style.setProperty("--to", placed(range, to));
  };
  range.addEventListener("input", () => (show(Number(range.value)), keep()));
  // While it is typed in, it is left as it is; but what is sent meanwhile has what stands there.
  number.addEventListener("input", () => (values[each.name] = accepted(each, number.value)));
  number.addEventListener("change", () => (show(accepted(each, number.value)), keep()));
  show(initial(each));
  return { row, show, range, number };
}

function field(each) {
  const id = `parameter-${each.name}`;
  const shared = { id, placeholder: each.placeholder, autocomplete: "off" };
  const input =
    each.kind === "text"
      ? make("textarea", { ...shared, rows: each.rows })
      : make("input", { ...shared, type: "text", inputMode: "numeric", pattern: "-?[0-9]{1,15}" });
  const row = make("div", { class: `parameter ${each.kind}` }, labelOf(each, id), input);
  const show = (value) => {
    values[each.name] = value;
    input.value = value;
  };
  input.addEventListener("input", () => ((values[each.name] = accepted(each, input.value)), keep()));
  input.addEventListener("change", () => show(accepted(each, input.value)));
  show(initial(each));
  return { row, show };
}

const placed = ({ min, max }, value) => `${(((value - min) / (max - min)) * 100).toFixed(1)}%`;

function labelOf(each, id) {
  const label = make("label", { for: id, id: `${id}-label` }, each.label);
  if (each.hint) label.append(" ", make("small", {}, each.hint));
  return label;
}
