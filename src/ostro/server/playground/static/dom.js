// Creates and finds elements, and announces text. Text is always set as text: nothing here parses HTML.

export const byId = (id) => document.getElementById(id);

/** An element with properties, including `class` and `data-`/`aria-` attributes; children are nodes or text. */
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

/** Whether there is a physical keyboard. A touch screen has no Shift+Enter, and its keyboard covers half the page. */
export const hasKeyboard = () => !matchMedia("(pointer: coarse)").matches;

/** Announces a text to screen readers once they have finished speaking. */
export function announce(text) {
  byId("announcer").textContent = text;
}

/** Changes an element's content, and keeps its end in view if it was. */
export function following(element, change) {
  const near = element.scrollHeight - element.scrollTop - element.clientHeight < 80;
  change();
  if (near) element.scrollTop = element.scrollHeight;
}

/** Draws at most once per frame: drawing a long text takes longer than a token, so tokens are drawn together. */
export function oncePerFrame(draw) {
  let asked = false;
  let resting = 0;
  const drawn = () => {
    asked = false;
    const begun = performance.now();
    draw();
    const took = performance.now() - begun;
    // Allow as much time again for the browser's layout.
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
