// Copying, where browsers allow it: to pages that came over TLS, or from this machine.

/** Whether the text is on the clipboard now. */
export async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}
