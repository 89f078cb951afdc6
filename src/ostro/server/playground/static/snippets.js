// A request as code: exactly what the page would send, except for the key, which is left out.

/** `request` is {url, body, withKey}; each function returns code that runs without changes. */
export const SNIPPETS = { curl, python, javascript };

function curl({ url, body, withKey }) {
  const lines = [`curl${body.stream ? " -N" : ""} ${quoted(url)}`, `-H 'Content-Type: application/json'`];
  if (withKey) lines.push('-H "Authorization: Bearer $OSTRO_API_KEY"');
  lines.push(`-d ${quoted(JSON.stringify(body, null, 2))}`);
  return lines.join(" \\\n  ") + "\n";
}

function python({ url, body, withKey }) {
  const headers = ['"Content-Type": "application/json"'];
  if (withKey) headers.push(`"Authorization": "Bearer " + os.environ["OSTRO_API_KEY"]`);
  return [
    "import json",
    ...(withKey ? ["import os"] : []),
    "import urllib.request",
    "",
    `body = ${pythonLiteral(body)}`,
    "request = urllib.request.Request(",
    `    ${JSON.stringify(url)},`,
    "    data=json.dumps(body).encode(),",
    `    headers={${headers.join(", ")}},`,
    ")",
    "with urllib.request.urlopen(request) as response:",
    ...(body.stream
      ? [
          "    for line in response:",
          '        data = line.decode().strip().removeprefix("data: ")',
          '        if data.startswith("{"):',
          '            for choice in json.loads(data)["choices"]:',
          `                print(${body.messages ? 'choice["delta"].get("content") or ""' : 'choice["text"]'}, end="", flush=True)`,
          ...(body.tools
            ? [
                '                for call in choice["delta"].get("tool_calls", ()):',
                '                    print(*(call.get("function") or call["custom"]).values(), sep="", end="", flush=True)',
              ]
            : []),
          "print()",
        ]
      : ["    print(json.load(response))"]),
    "",
  ].join("\n");
}

function javascript({ url, body, withKey }) {
  const headers = [`"Content-Type": "application/json"`];
  if (withKey) headers.push("Authorization: `Bearer ${process.env.OSTRO_API_KEY}`");
  return [
    `const body = ${JSON.stringify(body, null, 2)};`,
    `const response = await fetch(${JSON.stringify(url)}, {`,
    '  method: "POST",',
    `  headers: { ${headers.join(", ")} },`,
    "  body: JSON.stringify(body),",
    "});",
    "if (!response.ok) throw new Error(await response.text());",
    ...(body.stream
      ? [
          'let rest = "";',
          "for await (const text of response.body.pipeThrough(new TextDecoderStream())) {",
          '  const lines = (rest + text).split("\\n");',
          "  rest = lines.pop();",
          '  for (const line of lines.filter((each) => each.startsWith("data: {"))) {',
          "    for (const choice of JSON.parse(line.slice(6)).choices) {",
          `      process.stdout.write(${body.messages ? 'choice.delta.content ?? ""' : "choice.text"});`,
          ...(body.tools
            ? [
                "      for (const { function: called, custom } of choice.delta.tool_calls ?? []) {",
                '        process.stdout.write(Object.values(called ?? custom).join(""));',
                "      }",
              ]
            : []),
          "    }",
          "  }",
          "}",
        ]
      : ["console.log(await response.json());"]),
    "",
  ].join("\n");
}

// Quoted for a POSIX shell.
const quoted = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`);

function pythonLiteral(value, indent = "") {
  const deeper = indent + "    ";
  if (Array.isArray(value)) {
    return value.length ? `[\n${value.map((each) => `${deeper}${pythonLiteral(each, deeper)},\n`).join("")}${indent}]` : "[]";
  }
  if (value !== null && typeof value === "object") {
    const entries = Object.entries(value).map(([key, each]) => `${deeper}${JSON.stringify(key)}: ${pythonLiteral(each, deeper)},\n`);
    return `{\n${entries.join("")}${indent}}`;
  }
  if (typeof value === "string") return JSON.stringify(value);
  return { true: "True", false: "False", null: "None" }[String(value)] ?? String(value);
}
