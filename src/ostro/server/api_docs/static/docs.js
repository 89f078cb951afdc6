"use strict";

const form = document.getElementById("key");
const field = document.getElementById("key-field");
const trouble = document.getElementById("key-trouble");

/** Shows the API, or asks for the key if the server wants another one. */
async function show(key) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const response = await fetch("openapi.json", { headers, cache: "no-store" });
  if (response.status === 401 || response.status === 429) {
    const refusal = await response.json().catch(() => null);
    trouble.textContent = key ? (refusal?.error?.message ?? "The server refused this key.") : "";
    form.hidden = false;
    field.focus();
    return;
  }
  form.hidden = true;
  const ui = SwaggerUIBundle({
    url: "openapi.json",
    dom_id: "#api",
    deepLinking: true,
    // It would send the document to a server of Swagger's.
    validatorUrl: null,
    requestInterceptor: (request) => {
      if (request.loadSpec) Object.assign(request.headers, headers);
      return request;
    },
    onComplete: () => {
      // For requests that are tried out on the page.
      if (key) ui.preauthorizeApiKey("key", key);
    },
  });
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (field.value.trim()) show(field.value.trim());
});
show("");
