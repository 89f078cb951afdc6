"""One request in three dialects, and their answers in one form: for tests that hold the dialects equal."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from dialect_calls import CHAT, MESSAGES, RESPONSES, answered, events
from sse_events import streamed

Json = dict[str, Any]


@dataclass(frozen=True)
class Said:
    """An answer, whatever dialect it came in."""

    text: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    """Names, and arguments: those of Messages are objects, so all are compared as canonical JSON."""
    prompt_tokens: int
    generated_tokens: int
    is_cut: bool


class Unspeakable(Exception):
    """The dialect cannot express a field."""


# --- requests in the form of chat completions, translated ---------------------------------------------------------


def in_responses(chat: Json) -> Json:
    body = {name: value for name, value in chat.items() if name not in ("messages", "max_tokens", "enable_thinking")}
    body["input"] = [item for message in chat["messages"] for item in _items(message)]
    if "max_tokens" in chat:
        body["max_output_tokens"] = chat["max_tokens"]
    if "tools" in chat:
        body["tools"] = [{"type": tool["type"]} | tool[tool["type"]] for tool in chat["tools"]]
    if "enable_thinking" in chat:
        body["reasoning"] = {"effort": "medium" if chat["enable_thinking"] else "none"}
    if isinstance(choice := chat.get("tool_choice"), dict):
        body["tool_choice"] = _flat_choice(choice)
    return body


def in_messages(chat: Json) -> Json:
    """Raises Unspeakable."""
    known = {"messages", "max_tokens", "tools", "tool_choice", "parallel_tool_calls", "stop", "enable_thinking"}
    body = {name: value for name, value in chat.items() if name not in known}
    system = [message["content"] for message in chat["messages"] if message["role"] == "system"]
    if system:
        body["system"] = system[0]
    body["messages"] = [_blocks(message) for message in chat["messages"] if message["role"] != "system"]
    body |= {"model": "default", "max_tokens": chat.get("max_tokens", 100_000)}
    if "stop" in chat:
        body["stop_sequences"] = chat["stop"]
    if "enable_thinking" in chat:
        body["thinking"] = {"type": "adaptive" if chat["enable_thinking"] else "disabled"}
    if "tools" in chat:
        if any(tool["type"] != "function" for tool in chat["tools"]):
            raise Unspeakable
        functions = [tool["function"] for tool in chat["tools"]]
        body["tools"] = [
            {"name": each["name"], "input_schema": each.get("parameters", {})}
            | {name: each[name] for name in ("description", "strict") if name in each}
            for each in functions
        ]
    if "tool_choice" in chat or "parallel_tool_calls" in chat:
        body["tool_choice"] = _messages_choice(chat)
    return body


def _items(message: Json) -> list[Json]:
    if message["role"] == "tool":
        output = message["content"]
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": output}]
    items = [{"role": message["role"], "content": message["content"]}] if message.get("content") is not None else []
    for call in message.get("tool_calls", ()):
        items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    return items


def _blocks(message: Json) -> Json:
    if message["role"] == "tool":
        result = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
        return {"role": "user", "content": [result]}
    blocks = [{"type": "text", "text": message["content"]}] if message.get("content") is not None else []
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    return {"role": message["role"], "content": blocks}


def _flat_choice(choice: Json) -> Json:
    kind = choice["type"]
    if kind != "allowed_tools":
        return {"type": kind, **choice[kind]}
    allowed = choice["allowed_tools"]
    return {
        "type": kind,
        "mode": allowed["mode"],
        "tools": [{"type": tool["type"], "name": tool[tool["type"]]["name"]} for tool in allowed["tools"]],
    }


def _messages_choice(chat: Json) -> Json:
    choice = chat.get("tool_choice", "auto")
    if isinstance(choice, str):
        made: Json = {"type": {"required": "any"}.get(choice, choice)}
    elif choice["type"] == "function":
        made = {"type": "tool", "name": choice["function"]["name"]}
    else:
        raise Unspeakable
    if chat.get("parallel_tool_calls") is False:
        made["disable_parallel_tool_use"] = True
    return made


# --- answers, whole and streamed ----------------------------------------------------------------------------------


def by_chat(client: httpx.Client, body: Json) -> list[Said]:
    whole = answered(client, CHAT, **body)
    chunks = streamed(client, CHAT, body | {"stream_options": {"include_usage": True}})
    message = _merged([choice["delta"] for chunk in chunks for choice in chunk["choices"]])
    [reason] = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    [choice] = whole["choices"]
    return [
        _of_chat(choice["message"], choice["finish_reason"], whole["usage"]),
        _of_chat(message, reason, chunks[-1]["usage"]),
    ]


def by_responses(client: httpx.Client, body: Json) -> list[Said]:
    whole = answered(client, RESPONSES, **body)
    told = events(client, RESPONSES, **body)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    final = told[-1]["response"]
    assert "".join(event["delta"] for event in told if event["type"] == "response.output_text.delta") == _text(final)
    deltas = [event["delta"] for event in told if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == "".join(item["arguments"] for item in final["output"] if item["type"] == "function_call")
    return [_of_response(whole), _of_response(final)]


def by_messages(client: httpx.Client, body: Json) -> list[Said]:
    whole = answered(client, MESSAGES, **body)
    told = events(client, MESSAGES, **body)
    blocks: list[Json] = []
    for event in told:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"] | {"partial": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if "partial_json" in delta:
                blocks[event["index"]]["partial"] += delta["partial_json"]
            for name in ("text", "thinking"):
                if name in delta:
                    blocks[event["index"]][name] += delta[name]
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = _parsed(block["partial"] or "{}")
    ended = told[-2]
    return [_of_message(whole), _of_message({"content": blocks, **ended["delta"], "usage": ended["usage"]})]


def _of_chat(message: Json, reason: str, usage: Json) -> Said:
    calls = []
    for call in message.get("tool_calls") or ():
        given = call[call["type"]]
        calls.append((given["name"], _canonical(given.get("arguments", given.get("input")))))
    return Said(
        text=message.get("content") or "",
        reasoning=message.get("reasoning_content") or "",
        calls=tuple(calls),
        prompt_tokens=usage["prompt_tokens"],
        generated_tokens=usage["completion_tokens"],
        is_cut=reason == "length",
    )


def _of_response(response: Json) -> Said:
    calls, reasoning = [], ""
    for item in response["output"]:
        match item["type"]:
            case "function_call" | "custom_tool_call":
                calls.append((item["name"], _canonical(item.get("arguments", item.get("input")))))
            case "reasoning":
                reasoning += "".join(part["text"] for part in item["content"])
    return Said(
        text=_text(response),
        reasoning=reasoning,
        calls=tuple(calls),
        prompt_tokens=response["usage"]["input_tokens"],
        generated_tokens=response["usage"]["output_tokens"],
        is_cut=response["status"] == "incomplete",
    )


def _of_message(message: Json) -> Said:
    blocks, usage = message["content"], message["usage"]
    return Said(
        text="".join(block["text"] for block in blocks if block["type"] == "text"),
        reasoning="".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        calls=tuple(
            (block["name"], json.dumps(block["input"], sort_keys=True))
            for block in blocks
            if block["type"] == "tool_use"
        ),
        prompt_tokens=usage["input_tokens"] + usage["cache_read_input_tokens"],
        generated_tokens=usage["output_tokens"],
        is_cut=message["stop_reason"] in ("max_tokens", "model_context_window_exceeded"),
    )


def _text(response: Json) -> str:
    messages = [item for item in response["output"] if item["type"] == "message"]
    return "".join(part["text"] for item in messages for part in item["content"])


def _merged(deltas: list[Json]) -> Json:
    message: Json = {"content": "", "reasoning_content": ""}
    calls: list[Json] = []
    for delta in deltas:
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(calls):
                calls.append({"type": part["type"], part["type"]: dict(part[part["type"]])})
            else:
                for name, text in part[calls[-1]["type"]].items():
                    calls[-1][calls[-1]["type"]][name] += text
    return message | ({"tool_calls": calls} if calls else {})


def _canonical(arguments: str) -> str:
    """Canonical JSON; a custom tool's input and truncated arguments are returned as they are."""
    parsed = _parsed(arguments)
    return arguments if parsed is None else json.dumps(parsed, sort_keys=True)


def _parsed(arguments: str) -> Mapping[str, object] | None:
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None
