// A JSON field among the parameters: collapsed while empty, with any error shown below it.

import { make } from "./dom.js";

/** The value of a field's text. Throws Error with a sentence that names the field; `each.flaw` checks the value. */
export function parsed(each, text) {
  const { value, flaw } = read(each, text);
  if (flaw) throw new Error(`${each.label}: ${flaw} Correct the field among the parameters, or clear it.`);
  return value;
}

function read(each, text) {
  try {
    const value = JSON.parse(text);
    return { value, flaw: each.flaw(value) };
  } catch (error) {
    return { flaw: `This is not JSON. ${error.message}.` };
  }
}

/** `text()` returns the user's text, and `change(text)` sets it. */
export function jsonField(each, { id, text, change }) {
  const state = make("small");
  const row = make("details", { class: "fold" }, make("summary", {}, each.label, " ", state));
  const input = make("textarea", { id, rows: 8, wrap: "off", autocomplete: "off", spellcheck: false, "aria-describedby": `${id}-flaw` });
  const flaw = make("p", { class: "flaw", id: `${id}-flaw`, role: "alert" });
  const example = make("button", { type: "button", class: "quiet" }, "Example");
  const label = make("label", { for: id }, each.field);
  row.append(make("div", { class: "parameter json" }, label, example, input, flaw));

  const tell = () => {
    const found = text() ? read(each, text()).flaw : "";
    state.textContent = found ? "not valid" : text() ? "set" : "none";
    input.setAttribute("aria-invalid", String(Boolean(found)));
    example.hidden = Boolean(text());
    return found;
  };
  const show = () => {
    input.value = text();
    flaw.textContent = tell();
    if (text()) row.open = true;
  };
  // JSON is mostly invalid while being typed: errors are shown when the field loses focus.
  input.addEventListener("input", () => {
    change(input.value);
    if (!tell()) flaw.textContent = "";
  });
  input.addEventListener("change", () => (flaw.textContent = tell()));
  example.addEventListener("click", () => {
    change(JSON.stringify(each.example, null, 2));
    show();
    input.focus();
    input.setSelectionRange(0, 0);
    input.scrollTop = 0;
  });
  return { row, show };
}
