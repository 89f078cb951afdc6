// Requests to the server that sent this page. Knows the key and the format of errors; knows no endpoint.

import { eventsOf } from "./sse.js";
import { currentKey } from "./store.js";

/** An error whose message is a sentence for the user; `param` is the field of the request that it is about, if any. */
export class ApiError extends Error {
  constructor(message, { status = 0, isLost = false, param = null } = {}) {
    super(message);
    this.status = status;
    /** Whether the server gave no answer at all. */
    this.isLost = isLost;
    this.param = param;
  }
}

let wantKey = async () => false;

/** `ask(path, sentence)` asks the user for a key that a path accepts; resolves to whether there is one now. */
export function askForKeysBy(ask) {
  wantKey = ask;
}

/** The URL of an API path, also behind a proxy that serves the API under a prefix. */
export const urlOf = (path) => new URL(path.replace(/^\//, ""), document.baseURI.replace(/[^/]*$/, "")).href;

/** The response. If the server wants a key, asks the user for one and tries again, unless it is `quiet`. */
export async function ask(path, { quiet = false, key = null, ...request } = {}) {
  for (;;) {
    const used = key ?? currentKey();
    const response = await sent(path, request, used);
    if (response.ok) return response;
    const error = await refusal(response);
    if (error.status !== 401 || quiet || key !== null) throw error;
    // Another request may have asked for a key meanwhile.
    if (currentKey() === used && !(await wantKey(path, error.message))) throw withHint(error);
    request.signal?.throwIfAborted();
  }
}

async function sent(path, { method = "GET", body, signal }, key) {
  const headers = {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (key) headers["Authorization"] = `Bearer ${key}`;
  try {
    return await fetch(urlOf(path), { method, headers, signal, body: body && JSON.stringify(body), cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Check that it is running, then try again.", { isLost: true });
  }
}

export const askJson = async (path, options) => (await ask(path, options)).json();

/** The events of a streamed answer, parsed. Throws ApiError for an error event, and for an early end. */
export async function* streamed(path, body, signal) {
  const response = await ask(path, { method: "POST", body, signal });
  try {
    for await (const data of eventsOf(response.body)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message);
      yield event;
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
  }
  throw new ApiError("The connection broke off before the answer was complete. Try again.");
}

async function refusal(response) {
  const body = await response.json().catch(() => null);
  const sentences = [body?.error?.message ?? `The server answered with status ${response.status}.`];
  const seconds = Number(response.headers.get("Retry-After"));
  if (seconds) sentences.push(`Try again in ${seconds} second${seconds === 1 ? "" : "s"}.`);
  return new ApiError(sentences.join(" "), { status: response.status, param: body?.error?.param ?? null });
}

const withHint = (error) => new ApiError(`${error.message} You can type it under “Key”, at the top of this page.`, error);
