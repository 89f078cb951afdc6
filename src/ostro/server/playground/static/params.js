// The parameters: sliders and fields, the user's values, and the resulting request fields. Unchanged parameters show
// the model's own default, and are not sent. Whose values they are (a conversation's, say) is not known here.

import { byId, make } from "./dom.js";
import { jsonField, parsed } from "./json-field.js";
import { EXAMPLES, choicesAmong, flawOfSchema, flawOfTools, formatBy } from "./tools.js";

// Models allow more than a slider can set precisely; the field beside it accepts the whole range.
const SLIDER_TOKENS = 2048;
const MOST_TOKENS = 1_000_000;
// What this page sends to a model whose files recommend no sampling, as most GGUF files: the API's own default is
// temperature 1, at which small models ramble. `ostro chat` does the same.
const RECOMMENDABLE = ["temperature", "top_p", "top_k", "min_p"];
const OWN = { temperature: 0.6, top_p: 0.95 };

// `value` applies if neither the user nor the model sets one: it has no effect. A slider ends at `max`; if the API
// allows more, its field goes up to `most`. A parameter `within` another is shown below it.
const PARAMETERS = [
  { name: "system", label: "System prompt", kind: "text", modes: ["chat"], rows: 3, placeholder: "None" },
  { name: "tools", label: "Tools", field: "Tools as JSON", kind: "json", modes: ["chat"], flaw: flawOfTools, example: EXAMPLES.tools },
  { name: "tool_choice", label: "Tool choice", kind: "choice", modes: ["chat"], within: "tools" },
  { name: "schema", label: "JSON schema", field: "Schema as JSON", kind: "json", flaw: flawOfSchema, example: EXAMPLES.schema },
  { name: "strict", label: "Strict", hint: "or an error", kind: "check", value: true, within: "schema" },
  // A completion's own default would be 16 tokens.
  { name: "max_tokens", label: "Max tokens", min: 1, max: SLIDER_TOKENS, most: MOST_TOKENS, step: 1, value: null, completing: 256, placeholder: "no limit" },
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, value: 1, from: 0 },
  { name: "top_p", label: "Top p", min: 0.01, max: 1, step: 0.01, value: 1 },
  { name: "top_k", label: "Top k", hint: "0 is all", min: 0, max: 200, step: 1, value: 0 },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, value: 0 },
  { name: "top_n_sigma", label: "Top n sigma", hint: "0 is all", min: 0, max: 5, most: 100, step: 0.05, value: 0 },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.5, max: 2, step: 0.05, value: 1 },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1, value: 0 },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1, value: 0 },
  { name: "logprobs", label: "Alternatives", hint: "a token", min: 0, max: 20, step: 1, completing: 5, modes: ["complete"] },
  { name: "seed", label: "Seed", kind: "seed", placeholder: "a fresh one" },
  { name: "stop", label: "Stop at", hint: "one text per line, \\n is a newline", kind: "text", rows: 2, placeholder: "None" },
];

// By name: the user's values, which belong to whoever shows them, the model's defaults, null until it is loaded, and this
// page's own where it has none.
let chosen = {};
let keep = () => {};
const controls = {};
let defaults = {};
let own = {};
let mode = "chat";

export function buildParameters() {
  for (const each of PARAMETERS) {
    const control = (CONTROLS[each.kind] ?? slider)(each);
    controls[each.name] = control;
    (controls[each.within]?.row ?? byId("parameters-list")).append(control.row);
  }
  byId("parameters-reset").addEventListener("click", () => {
    for (const name of Object.keys(chosen)) delete chosen[name];
    showAll();
    keep();
  });
}

/** Shows values, which the user then changes in place; `changed()` is called after each change. */
export function showValues(values, changed) {
  for (const name of Object.keys(values)) {
    const each = PARAMETERS.find((parameter) => parameter.name === name);
    const value = each && accepted(each, values[name]);
    if (value === undefined) delete values[name];
    else values[name] = value;
  }
  chosen = values;
  keep = changed;
  showAll();
}

/** Shows the parameters of a mode. */
export function showParametersOf(current) {
  mode = current;
  for (const each of PARAMETERS) controls[each.name].row.hidden = !isFor(each);
  byId("score-note").hidden = mode !== "score";
  showOwn();
  byId("parameters-reset").hidden = mode === "score";
  showAll();
}

export const systemPrompt = () => (chosen.system ?? "").trim();

/** A mode's request fields, by their API names. Throws Error with a sentence about a field that cannot be sent. */
export function requestParameters(of) {
  const body = {};
  for (const each of PARAMETERS) {
    if (!isFor(each, of)) continue;
    const value = chosen[each.name] ?? own[each.name] ?? (of === "complete" ? each.completing : undefined);
    if (value === undefined || value === "") continue;
    Object.assign(body, (FIELDS[each.name] ?? numberField)(value, each));
  }
  return body;
}

const numberField = (value, { name }) => ({ [name]: Number(value) });

// How values become request fields, unless they are numbers of the same name.
const FIELDS = {
  // Part of the messages.
  system: () => ({}),
  tools: (text, each) => ({ tools: parsed(each, text) }),
  tool_choice: (choice) => (isOffered(choice) ? { tool_choice: choice } : {}),
  schema: (text, each) => ({ response_format: formatBy(parsed(each, text), { strict: chosen.strict ?? true }) }),
  // Part of the schema's field.
  strict: () => ({}),
  stop: (text) => ({ stop: stopsIn(text) }),
};

/** Adapts to the chosen model: its defaults, and sliders limited to its context. */
export function showModel(card) {
  defaults = card?.sampling_defaults === undefined ? {} : card.sampling_defaults;
  own = defaults && card && !RECOMMENDABLE.some((name) => name in defaults) ? OWN : {};
  showOwn();
  const most = card?.max_model_len;
  controls.max_tokens.range.max = Math.min(most ?? SLIDER_TOKENS, SLIDER_TOKENS);
  controls.max_tokens.number.max = most ?? MOST_TOKENS;
  if (most && chosen.max_tokens > most) chosen.max_tokens = most;
  // Do not change a field that is being edited.
  for (const each of PARAMETERS) if (!controls[each.name].row.contains(document.activeElement)) controls[each.name].show();
}

const isFor = (each, of = mode) => of !== "score" && (!each.modes || each.modes.includes(of));
const stopsIn = (value) =>
  value.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n").replaceAll("\\t", "\t"));

function showAll() {
  for (const each of PARAMETERS) controls[each.name].show();
}

/** The value if the user sets none: null for no limit, undefined if not known yet. */
function defaultOf(each) {
  if (mode === "complete" && each.completing !== undefined) return each.completing;
  return defaults === null ? undefined : (defaults[each.name] ?? own[each.name] ?? each.value);
}

function showOwn() {
  const words = Object.entries(own).map(([name, value]) => `${name} ${value}`);
  byId("own-note").hidden = mode === "score" || !words.length;
  byId("own-note").textContent = `The model recommends no sampling. This page uses ${words.join(", ")}; the API's default is 1 for both.`;
}

/** The value of a text or number, clamped to the parameter's range; undefined if it has none. */
function accepted(each, given) {
  if (each.kind === "text") return String(given) || undefined;
  if (each.kind === "json") return String(given).trim() ? String(given) : undefined;
  if (each.kind === "choice" || each.kind === "check") return given === each.value ? undefined : given;
  if (each.kind === "seed") return /^-?\d{1,15}$/.test(given) ? String(given) : undefined;
  const number = Number(given);
  if (given === "" || given === null || !Number.isFinite(number)) return undefined;
  const whole = each.step === 1 ? Math.round(number) : number;
  return Math.min(Math.max(whole, each.min), Number(controls[each.name].number.max));
}

function choose(each, value) {
  if (value === undefined) delete chosen[each.name];
  else chosen[each.name] = value;
}

function slider(each) {
  const id = idOf(each);
  const bounds = { min: each.min, max: each.max, step: each.step };
  const number = make("input", { type: "number", id, inputMode: "decimal", ...bounds, max: each.most ?? each.max });
  const range = make("input", { type: "range", "aria-labelledby": `${id}-label`, ...bounds });
  const row = make("div", { class: "parameter" }, labelOf(each, id), number, range);
  const show = () => {
    const given = chosen[each.name];
    const value = given ?? defaultOf(each);
    number.value = value ?? "";
    number.placeholder = value === null ? each.placeholder : "default";
    range.value = value === null ? range.max : (value ?? each.value ?? each.max);
    row.classList.toggle("untouched", given === undefined);
    number.title = given === undefined ? `Unchanged: the ${each.name in own ? "page" : "model"}'s default applies` : "";
    // Coloured from the neutral value to the current one.
    const [from, to] = [each.from ?? each.value ?? each.min, Number(range.value)].sort((a, b) => a - b);
    range.style.setProperty("--from", placed(range, from));
    range.style.setProperty("--to", placed(range, to));
  };
  range.addEventListener("input", () => (choose(each, Number(range.value)), show(), keep()));
  // The field is not reformatted while being edited, but requests already use its current text.
  number.addEventListener("input", () => choose(each, accepted(each, number.value)));
  number.addEventListener("change", () => (choose(each, accepted(each, number.value)), show(), keep()));
  return { row, show, range, number };
}

function field(each) {
  const id = idOf(each);
  const shared = { id, placeholder: each.placeholder, autocomplete: "off" };
  const input =
    each.kind === "text"
      ? make("textarea", { ...shared, rows: each.rows })
      : make("input", { ...shared, type: "text", inputMode: "numeric", pattern: "-?[0-9]{1,15}" });
  const row = make("div", { class: `parameter ${each.kind}` }, labelOf(each, id), input);
  const show = () => (input.value = chosen[each.name] ?? "");
  input.addEventListener("input", () => (choose(each, accepted(each, input.value)), keep()));
  input.addEventListener("change", show);
  return { row, show };
}

/** A collapsed JSON field. */
function foldedJson(each) {
  return jsonField(each, {
    id: idOf(each),
    text: () => chosen[each.name] ?? "",
    change(text) {
      choose(each, accepted(each, text));
      for (const inner of PARAMETERS) if (inner.within === each.name) controls[inner.name].show();
      keep();
    },
  });
}

/** A select for the tool choice. */
function selection(each) {
  const select = make("select", { id: idOf(each) });
  const show = () => {
    const choices = choicesAmong(chosen.tools);
    select.replaceChildren(...choices.map(([label, value]) => make("option", { value: JSON.stringify(value) }, label)));
    select.value = JSON.stringify(isOffered(chosen[each.name]) ? chosen[each.name] : "auto");
  };
  select.addEventListener("change", () => {
    const choice = JSON.parse(select.value);
    choose(each, choice === "auto" ? undefined : choice);
    keep();
  });
  return { row: make("div", { class: "parameter choices" }, labelOf(each, idOf(each)), select), show };
}

/** Updates the options: the chosen tool may be gone, and without tools there is no choice. */
const isOffered = (choice) =>
  choicesAmong(chosen.tools).some(([, value]) => JSON.stringify(value) === JSON.stringify(choice)) && Boolean(chosen.tools);

function checkbox(each) {
  const box = make("input", { type: "checkbox", id: idOf(each) });
  box.addEventListener("change", () => (choose(each, accepted(each, box.checked)), keep()));
  const show = () => (box.checked = chosen[each.name] ?? each.value);
  return { row: make("div", { class: "parameter check" }, box, labelOf(each, idOf(each))), show };
}

const CONTROLS = { text: field, seed: field, json: foldedJson, choice: selection, check: checkbox };

const idOf = ({ name }) => `parameter-${name}`;
const placed = ({ min, max }, value) => `${(((value - min) / (max - min)) * 100).toFixed(1)}%`;

function labelOf(each, id) {
  const label = make("label", { for: id, id: `${id}-label` }, each.label);
  if (each.hint) label.append(" ", make("small", {}, each.hint));
  return label;
}
