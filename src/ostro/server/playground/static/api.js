// Requests to the server that sent this page. Knows the key and the format of errors; knows no endpoint.

import { eventsOf } from "./sse.js";
import { currentKey } from "./store.js";

/** An error whose message is a sentence for the user. */
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** The URL of an API path, also behind a proxy that serves the API under a prefix. */
export const urlOf = (path) => new URL(path.replace(/^\//, ""), document.baseURI.replace(/[^/]*$/, "")).href;

export async function ask(path, { method = "GET", body, signal } = {}) {
  const headers = {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (currentKey()) headers["Authorization"] = `Bearer ${currentKey()}`;
  let response;
  try {
    response = await fetch(urlOf(path), { method, headers, signal, body: body && JSON.stringify(body), cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Check that it is running, then try again.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
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
  if (response.status === 401) sentences.push("You can type it under “Key”, at the top of this page.");
  return new ApiError(sentences.join(" "), response.status);
}
