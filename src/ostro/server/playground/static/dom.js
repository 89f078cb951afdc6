// Making and finding elements, and what they say. Text is always set as text: nothing here reads HTML.

export const byId = (id) => document.getElementById(id);

/** An element with properties, `class` and `data-`/`aria-` attributes among them, and children that are nodes or text. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") element.className = value;
    else if (name.includes("-") || name === "role" || name === "for") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

export function svg(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** Whether keys are pressed on a keyboard. On a touch screen there is no Shift+Enter, and focus covers half the page. */
export const hasKeyboard = () => !matchMedia("(pointer: coarse)").matches;

/** Says something to screen readers once they have finished speaking. */
export function announce(text) {
  byId("announcer").textContent = text;
}

/** Changes what an element shows and keeps its end in sight, if it was. */
export function following(element, change) {
  const near = element.scrollHeight - element.scrollTop - element.clientHeight < 80;
  change();
  if (near) element.scrollTop = element.scrollHeight;
}

/** Drawing a long text takes longer than a token: what comes meanwhile is drawn together, and leaves time for the rest. */
export function oncePerFrame(draw) {
  let asked = false;
  let resting = 0;
  const drawn = () => {
    asked = false;
    const begun = performance.now();
    draw();
    const took = performance.now() - begun;
    // The browser itself has to lay out as much again.
    resting = took > 8 ? took * 3 : 0;
  };
  return () => {
    if (asked) return;
    asked = true;
    setTimeout(requestAnimationFrame, resting, drawn);
  };
}

export const seconds = (milliseconds) =>
  milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(1)} s`;
