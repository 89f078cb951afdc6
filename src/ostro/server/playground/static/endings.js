// How an answer ended early: what the page says about it, and how it is continued.

const SENTENCES = {
  __proto__: null,
  stopped: "You stopped this answer.",
  lost: "This answer broke off: the connection or the server failed.",
  left: "This page was closed before the answer was complete.",
  length: "This answer was cut off: max tokens reached, or the context is full.",
  repetition: "The server ended this answer: it was repeating itself.",
};

export const isEarlyEnd = (ended) => typeof ended === "string" && ended in SENTENCES;

export const sentenceOf = ({ ended }) => SENTENCES[ended] ?? "";

/** How a turn ended early, as its `ended`: from the outcome of its request and the model's reason. */
export function endOf(outcome, reason) {
  if (outcome !== "done") return outcome === "stopped" ? "stopped" : "lost";
  return isEarlyEnd(reason) ? reason : undefined;
}

/** Whether the model can go on with a turn. What a call is cut off in cannot be said again as a prompt. */
export const isContinuable = (turn) => isEarlyEnd(turn.ended) && !turn.tool_calls;

/** The request that continues the answer with which a conversation's request ends. */
export function continuing({ path, body }) {
  // Both apply to a whole answer: the rest would have to begin like one.
  const { response_format, tool_choice, ...rest } = body;
  const messages = [...body.messages.slice(0, -1), begun(body.messages.at(-1))];
  return { path, body: { ...rest, messages, continue_final_message: true, add_generation_prompt: false } };
}

/** Reasoning without an answer is continued as the text that it was: templates close the other kind. */
function begun({ reasoning_content: thought, ...message }) {
  if (!thought) return message;
  return message.content ? { ...message, reasoning_content: thought } : { ...message, content: `<think>\n${thought}` };
}
