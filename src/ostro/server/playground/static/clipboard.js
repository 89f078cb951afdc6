// The clipboard, where browsers allow it: in secure contexts (TLS or localhost).

/** Copies the text; returns whether it is on the clipboard now. */
export async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}
