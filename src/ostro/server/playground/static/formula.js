// A formula as MathML. Temml reads its TeX, and elements are made here: of those kinds alone that draw something. It is
// loaded with the first formula, together with its styles. What it cannot read is shown as it was written.

import { following, make } from "./dom.js";

const MATHML = "http://www.w3.org/1998/Math/MathML";
const urlOf = (name) => new URL(`./vendor/${name}`, import.meta.url).href;

// Definitions could grow without bounds, and nothing in an answer needs its own.
const DEFINING = ["def", "gdef", "edef", "xdef", "let", "futurelet", "global", "long", "newcommand", "renewcommand", "providecommand"];
const OPTIONS = { throwOnError: true, trust: false, strict: false, maxSize: [20, 20], maxExpand: 1000 };
// A table of 60 by 60 has some 8,000 elements; drawing deeply nested ones takes browsers long.
const MOST_ELEMENTS = 10_000;
const DEEPEST = 100;
const MOST_KEPT = 500;

const ELEMENTS = new Set(
  `math mrow mi mo mn ms mtext mspace mfrac msqrt mroot msub msup msubsup munder mover munderover mmultiscripts mprescripts
  none mtable mtr mtd mpadded mphantom mstyle menclose`.split(/\s+/),
);
const ATTRIBUTES = new Set(
  `accent accentunder columnalign columnspan depth display displaystyle fence form height largeop linethickness lspace
  mathbackground mathcolor mathsize mathvariant maxsize minsize movablelimits notation rowspacing rspace scriptlevel
  separator stretchy symmetric voffset width`.split(/\s+/),
);

// By their TeX: elements to copy, or null where there are none.
const drawn = new Map();
// {node, token} of formulas that wait for Temml.
let waiting = [];
let temml = null;
let isLoading = false;

/** A node that shows a formula's token, or its source while its end, or Temml, has not come. */
export function formula(token) {
  const node = make("span", { class: token.display ? "formula display" : "formula" });
  if (temml && !token.open) draw(node, token);
  else {
    showSource(node, token);
    if (!token.open) drawLater(node, token);
  }
  return node;
}

function showSource(node, { raw }) {
  node.replaceChildren(make("code", { class: "tex" }, raw.trim()));
}

function drawLater(node, token) {
  waiting.push({ node, token });
  if (isLoading) return;
  isLoading = true;
  const styles = make("link", { rel: "stylesheet", href: urlOf("temml.css") });
  // Not a module: it leaves its functions in a global variable.
  const script = make("script", { src: urlOf("temml.min.js") });
  script.addEventListener("load", () => {
    script.remove();
    temml = globalThis.temml;
    const shown = waiting.splice(0).filter((each) => each.node.isConnected);
    const drawAll = () => shown.forEach((each) => draw(each.node, each.token));
    const sheet = shown[0]?.node.closest(".sheet");
    if (sheet) following(sheet, drawAll);
    else drawAll();
  });
  script.addEventListener("error", () => {
    script.remove();
    styles.remove();
    // The next formula tries again.
    isLoading = false;
    waiting = [];
  });
  document.head.append(styles, script);
}

function draw(node, token) {
  const key = `${token.display} ${token.tex}`;
  if (!drawn.has(key)) {
    if (drawn.size >= MOST_KEPT) drawn.delete(drawn.keys().next().value);
    drawn.set(key, elementsOf(token));
  }
  const elements = drawn.get(key);
  if (!elements) {
    showSource(node, token);
    return;
  }
  node.replaceChildren(elements.cloneNode(true));
  widths.observe(node);
}

/** The formula's `math` element; null if the TeX has an error, is not safe, or is too large. */
function elementsOf({ tex, display }) {
  const macros = Object.fromEntries(DEFINING.map((name) => [`\\${name}`, "\\refused"]));
  try {
    const tree = temml.__renderToMathMLTree(tex, { ...OPTIONS, macros, displayMode: display, wrap: display ? "none" : "tex" });
    return elementOf(tree, { left: MOST_ELEMENTS }, 0);
  } catch {
    // Also where it is nested too deeply for Temml's recursion.
    return null;
  }
}

function elementOf({ type, text, attributes = {}, classes = [], style = {}, children = [] }, budget, depth) {
  if (type === undefined && typeof text === "string") return document.createTextNode(text);
  if (type === undefined && children.length) return fragmentOf(children, budget, depth);
  if (!ELEMENTS.has(type) || depth > DEEPEST || --budget.left < 0) throw new Error("This formula is not drawn.");
  const element = document.createElementNS(MATHML, type);
  for (const [name, value] of Object.entries(attributes)) if (ATTRIBUTES.has(name)) element.setAttribute(name, value);
  if (classes.length) element.setAttribute("class", classes.join(" "));
  // Through the object model, which the page's policy allows; colours and lengths, never addresses.
  for (const [name, value] of Object.entries(style)) if (!/url|image|\(/i.test(value)) element.style[name] = value;
  element.append(fragmentOf(children, budget, depth + 1));
  return element;
}

function fragmentOf(children, budget, depth) {
  const fragment = document.createDocumentFragment();
  for (const child of children) fragment.append(elementOf(child, budget, depth));
  return fragment;
}

// A formula that is wider than its line gets a scrollbar, and the keyboard reaches it. In the next frame: changing a
// size while sizes are observed is an error.
const widths = new ResizeObserver((entries) => requestAnimationFrame(() => entries.forEach(({ target }) => fit(target))));

function fit(node) {
  if (!node.isConnected) {
    widths.unobserve(node);
    return;
  }
  const isWide = node.scrollWidth > node.clientWidth + 1;
  if (isWide === node.classList.contains("wide")) return;
  node.classList.toggle("wide", isWide);
  for (const [name, value] of [["tabindex", "0"], ["role", "group"], ["aria-label", "Formula"]]) {
    if (isWide) node.setAttribute(name, value);
    else node.removeAttribute(name);
  }
}
