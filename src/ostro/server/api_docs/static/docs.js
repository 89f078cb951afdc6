"use strict";

SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#api",
  deepLinking: true,
  // It would send the document to a server of Swagger's.
  validatorUrl: null,
});
