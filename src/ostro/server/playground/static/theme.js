// Light, dark or as the system: the choice is kept in this browser. Loaded before the first paint.

import { announce, byId } from "./dom.js";
import { opensMenu } from "./menu.js";
import { remember, setting } from "./store.js";

const NAMES = { system: "As the system", light: "Light", dark: "Dark" };

const chosen = () => (Object.hasOwn(NAMES, setting("theme")) ? setting("theme") : "system");

export function buildTheme() {
  const items = () => Object.entries(NAMES).map(([name, label]) => [label, () => choose(name), name === chosen()]);
  opensMenu(byId("theme"), items);
}

function choose(name) {
  remember("theme", name);
  apply();
  announce(`Colours: ${NAMES[name]}.`);
}

function apply() {
  document.documentElement.dataset.theme = chosen();
}

apply();
