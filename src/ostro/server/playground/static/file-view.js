// A file of a message that was sent.

import { CodeBlock } from "./code-block.js";
import { make } from "./dom.js";
import { factsOf, languageOf } from "./text-file.js";

/** A node that shows a sent file; its text is drawn when it is opened. */
export function fileView(file) {
  const node = make("details", { class: "file" }, make("summary", {}, make("b", {}, file.name), ` ${factsOf(file)}`));
  node.addEventListener(
    "toggle",
    () => {
      const block = new CodeBlock(languageOf(file.name), { label: `Text of ${file.name}` });
      block.update(file.text);
      node.append(block.node);
    },
    { once: true },
  );
  return node;
}
