// What an answer's events bring, put together: text, reasoning, and the calls of tools bit by bit.

/** Adds to a turn; says whether there was anything to add. */
export function takeDelta(turn, delta) {
  const thought = delta.reasoning_content ?? delta.reasoning;
  if (thought) turn.reasoning_content = (turn.reasoning_content ?? "") + thought;
  if (delta.content) turn.content += delta.content;
  const calls = delta.tool_calls ?? [];
  for (const part of calls) takeCall((turn.tool_calls ??= []), part);
  return Boolean(thought || delta.content || calls.length);
}

// The first part of a call has its id, its type and its name; the others go on with its arguments.
function takeCall(calls, { index, id, type, function: called, custom }) {
  if (!calls[index]) {
    calls[index] = { id, type, [type]: { ...(called ?? custom) } };
  } else if (called) calls[index].function.arguments += called.arguments;
  else calls[index].custom.input += custom.input;
}
