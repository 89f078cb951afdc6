// Merges an answer's deltas: text, reasoning, and tool calls piece by piece.

/** Adds a delta to a turn; returns whether there was anything to add. */
export function takeDelta(turn, delta) {
  const thought = delta.reasoning_content ?? delta.reasoning;
  if (thought) turn.reasoning_content = (turn.reasoning_content ?? "") + thought;
  if (delta.content) turn.content += delta.content;
  const calls = delta.tool_calls ?? [];
  for (const part of calls) takeCall((turn.tool_calls ??= []), part);
  return Boolean(thought || delta.content || calls.length);
}

// A call's first delta has its id, type and name; the others continue its arguments.
function takeCall(calls, { index, id, type, function: called, custom }) {
  if (!calls[index]) {
    calls[index] = { id, type, [type]: { ...(called ?? custom) } };
  } else if (called) calls[index].function.arguments += called.arguments;
  else calls[index].custom.input += custom.input;
}
