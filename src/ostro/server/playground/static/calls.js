// Tool calls, and the results that the user enters for them.

import { CodeBlock } from "./code-block.js";
import { make } from "./dom.js";
import { indented, isJson } from "./json-text.js";
import { submitByKeys } from "./keys.js";

const partsOf = (call) => call.function ?? call.custom;

/** The names of an answer's calls on the page: numbered if a tool is called twice. */
export function namesOf(calls) {
  const names = calls.map((call) => partsOf(call).name);
  const isTwice = (name) => names.indexOf(name) !== names.lastIndexOf(name);
  return names.map((name, index) => (isTwice(name) ? `${name} (${index + 1})` : name));
}

/** A node that shows a growing call. */
export class CallView {
  #block;

  constructor(call) {
    const { name } = partsOf(call);
    const title = make("span", {}, "Call of ", make("b", {}, name));
    this.#block = new CodeBlock(call.function ? "json" : "", { title, label: `Arguments of ${name}` });
    this.node = this.#block.node;
    this.node.classList.add("call");
  }

  update({ function: called, custom }) {
    this.#block.update(called ? indented(called.arguments) : custom.input);
  }
}

/** A node that shows the results of calls. */
export class ResultsView {
  node = make("div", { class: "results" });

  /** `calls` are the previous answer's. */
  constructor(calls) {
    this.calls = calls;
  }

  finish({ results }) {
    const names = namesOf(this.calls);
    const blocks = results.map(({ tool_call_id: id, content }) => {
      const name = names[this.calls.findIndex((call) => call.id === id)] ?? "a call";
      const title = make("span", {}, "Result of ", make("b", {}, name));
      const json = isJson(content);
      const block = new CodeBlock(json ? "json" : "", { title, label: `Result of ${name}` });
      block.update(json ? indented(content) : content);
      block.node.classList.add("result");
      return block.node;
    });
    this.node.replaceChildren(...blocks);
  }
}

/** A form for the results of calls, filled with `results` if there are any. Calls `send` with the results, or `cancel`,
 *  if given, to leave everything unchanged. */
export function resultsForm(calls, { results = [], send, cancel = null }) {
  const names = namesOf(calls);
  const fields = calls.map(({ id }, index) => {
    const value = results.find((result) => result.tool_call_id === id)?.content ?? "";
    const label = `Result of ${names[index]}`;
    return make("textarea", { value, rows: 2, placeholder: label, "aria-label": label, "data-enter": "send", spellcheck: false });
  });
  const bar = make("div", { class: "bar" });
  if (cancel) bar.append(button("Cancel", "quiet", cancel));
  bar.append(make("button", { type: "submit", class: "go changes" }, calls.length > 1 ? "Send results" : "Send result"));
  const form = make("form", { class: "editor results" }, ...fields, bar);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(calls.map(({ id }, index) => ({ tool_call_id: id, content: fields[index].value })));
  });
  // Go to the next field first: Enter would send the others empty.
  const nextEmpty = (field) => fields.find((each) => !each.value && each !== field);
  submitByKeys(form, { cancel, submit: (field) => (nextEmpty(field) ? nextEmpty(field).focus() : form.requestSubmit()) });
  return form;
}

function button(label, kind, act) {
  const made = make("button", { type: "button", class: kind }, label);
  made.addEventListener("click", act);
  return made;
}
