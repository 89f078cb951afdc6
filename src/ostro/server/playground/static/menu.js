// A menu that opens below a button: one popover for the whole page, filled when it opens.

import { byId, make } from "./dom.js";

const menu = byId("menu");
let anchor = null;

export function buildMenu() {
  menu.addEventListener("keydown", move);
  menu.addEventListener("toggle", (event) => {
    const open = event.newState === "open";
    anchor?.setAttribute("aria-expanded", String(open));
    // Only if focus was inside: a click elsewhere has moved it on purpose.
    if (!open && menu.contains(document.activeElement)) anchor?.focus();
  });
}

/** A button that opens a menu; `items()` gives its items when it opens: [label, act], or [label, act, isChosen]. */
export function opensMenu(button, items) {
  button.setAttribute("aria-haspopup", "menu");
  button.setAttribute("aria-expanded", "false");
  button.addEventListener("click", () => open(button, items()));
}

function open(button, items) {
  anchor = button;
  menu.setAttribute("aria-label", button.getAttribute("aria-label") ?? button.textContent);
  menu.replaceChildren(...items.map(itemOf));
  // Inside the list of conversations, which would close otherwise if it is a popover itself.
  menu.showPopover({ source: button });
  place(button.getBoundingClientRect());
  (menu.querySelector("[aria-checked=true]") ?? menu.firstChild).focus();
}

function itemOf([label, act, isChosen]) {
  const role = isChosen === undefined ? { role: "menuitem" } : { role: "menuitemradio", "aria-checked": String(isChosen) };
  const item = make("button", { type: "button", ...role, tabIndex: -1 }, label);
  item.addEventListener("click", () => {
    menu.hidePopover();
    act();
  });
  return item;
}

/** Places the menu below the button and within the window, or above it if there is no room below. */
function place(around) {
  const left = Math.min(around.left, innerWidth - menu.offsetWidth - 8);
  const below = around.bottom + 4;
  const fits = below + menu.offsetHeight <= innerHeight - 8;
  menu.style.left = `${Math.max(8, left)}px`;
  menu.style.top = `${fits ? below : Math.max(8, around.top - menu.offsetHeight - 4)}px`;
}

function move(event) {
  const items = [...menu.children];
  const at = items.indexOf(document.activeElement);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 }[event.key];
  if (event.key === "Tab") menu.hidePopover();
  if (to === undefined) return;
  event.preventDefault();
  items.at(to % items.length).focus();
}
