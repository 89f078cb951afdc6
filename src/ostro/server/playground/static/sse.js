// Parses server-sent events from a body's bytes, however the network has split them.

/** The data of each event, as text. */
export async function* eventsOf(body) {
  let rest = "";
  for await (const text of textOf(body)) {
    const events = (rest + text).split(/\r?\n\r?\n/);
    rest = events.pop();
    for (const event of events) {
      const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      if (lines.length) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
    }
  }
}

// Not `for await` over the stream itself: not all browsers support it.
async function* textOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) yield part.value;
  } finally {
    reader.cancel().catch(() => {});
  }
}
