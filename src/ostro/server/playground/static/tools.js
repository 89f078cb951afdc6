// Tools and formats in the API's form: their request fields, and the checks that the page can make. The server checks
// the rest.

export const EXAMPLES = {
  tools: [
    {
      type: "function",
      function: {
        name: "get_weather",
        description: "The weather in a city now.",
        parameters: {
          type: "object",
          properties: { city: { type: "string" } },
          required: ["city"],
          additionalProperties: false,
        },
      },
    },
  ],
  schema: {
    type: "object",
    properties: { city: { type: "string" }, country: { type: "string" }, population: { type: "integer" } },
    required: ["city", "country", "population"],
    additionalProperties: false,
  },
};

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

export const flawOfTools = (value) =>
  Array.isArray(value) && value.every(isObject) ? "" : 'This must be a list of tools: [{"type": "function", "function": {…}}].';

export const flawOfSchema = (value) => (isObject(value) ? "" : 'This must be an object: {"type": "object", "properties": {…}}.');

/** The `response_format` for a schema. */
export const formatBy = (schema, { strict }) => ({ type: "json_schema", json_schema: { name: "answer", strict, schema } });

/** [label, tool_choice] pairs for the tools in a text that may not be valid JSON yet. */
export function choicesAmong(text) {
  const modes = ["auto", "none", "required"].map((mode) => [mode, mode]);
  return [...modes, ...toolsIn(text).flatMap(named)];
}

function toolsIn(text) {
  try {
    const value = JSON.parse(text);
    return flawOfTools(value) ? [] : value;
  } catch {
    return [];
  }
}

function named(tool) {
  const name = Object.hasOwn(tool, tool.type) ? tool[tool.type]?.name : undefined;
  return typeof name === "string" ? [[name, { type: tool.type, [tool.type]: { name } }]] : [];
}
