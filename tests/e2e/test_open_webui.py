"""What Open WebUI (0.12.4) sends with its default settings: nearly 40 tools of its own, from the first message on.

Installing it takes 260 packages, so its requests are replayed. The tools' names and the types of their parameters are
as its sources have them; their descriptions are filler of the same length.
"""

import re
from typing import Any

from client_process import CHAT_CALL, SUNNY
from live_server import LiveServer
from sse_events import streamed

Json = dict[str, Any]

# A tool in each line: the length of its descriptions, its name and its parameters. `s` is a string, `i` an integer, `b`
# a boolean, `l` a list of strings, `o` a list of objects; optional ones are followed by a question mark.
TOOLS = """
43 get_current_timestamp
482 calculate_timestamp days_ago:i? weeks_ago:i? months_ago:i? years_ago:i?
424 ask_user questions:o allow_other:b? timeout_ms:i?
186 list_knowledge_bases count:i? skip:i?
255 search_knowledge_bases query:s count:i? skip:i?
267 query_knowledge_bases query:s count:i?
426 search_knowledge_files query:s knowledge_id:s? count:i? skip:i?
405 query_knowledge_files query:s knowledge_ids:l? count:i?
652 grep_knowledge_files pattern:s file_id:s? case_insensitive:b? count_only:b?
435 view_knowledge_file file_id:s offset:i? max_chars:i? line_numbers:b? start_line:i? end_line:i?
546 search_chats query:s count:i? start_timestamp:i? end_timestamp:i?
136 view_chat chat_id:s
199 list_memory_paths query:s? count:i? type:s?
195 read_memory_path path:s count:i? type:s? include_children:b?
254 search_memories query:s? count:i? type:s? path:s? memory_id:s?
482 add_memory content:s type:s? path:s?
885 update_memory operations:o
253 replace_memory_content memory_id:s content:s type:s? path:s?
63 delete_memory memory_id:s
69 list_memories
237 execute_code code:s
264 search_notes query:s count:i? start_timestamp:i? end_timestamp:i?
72 view_note note_id:s
110 write_note title:s content:s
982 replace_note_content note_id:s content:s? operations:o? title:s?
320 create_skill id:s name:s content:s files:o? commit_message:s?
242 create_tasks tasks:o
181 update_task id:s status:s?
973 create_automation name:s prompt:s rrule:s folder_id:s?
445 update_automation automation_id:s name:s? prompt:s? rrule:s? model_id:s? folder_id:s?
231 list_automations status:s? folder_id:s? count:i?
135 toggle_automation automation_id:s
89 delete_automation automation_id:s
447 search_calendar_events query:s? start:s? end:s? count:i?
837 create_calendar_event title:s start:s end:s? description:s? all_day:b? location:s? reminder_minutes:i?
629 update_calendar_event event_id:s title:s? description:s? start:s? end:s? all_day:b? is_cancelled:b?
66 delete_calendar_event event_id:s
"""
TYPES: dict[str, Json] = {
    "s": {"type": "string"},
    "i": {"type": "integer", "default": 5},
    "b": {"type": "boolean", "default": False},
    "l": {"type": "array", "items": {"type": "string"}},
    "o": {"type": "array", "items": {"type": "object", "additionalProperties": True}},
}


def filler(length: int) -> str:
    return ("What it does and when to use it. " * (length // 33 + 1))[:length]


def tool(line: str) -> Json:
    length, name, *fields = line.split()
    share = int(length) // (len(fields) + 1)
    found = [re.fullmatch(r"(\w+):(\w)(\??)", field) for field in fields]
    matches = [match for match in found if match is not None]
    assert len(matches) == len(fields)
    parameters = {
        "properties": {match[1]: {**TYPES[match[2]], "description": filler(share)} for match in matches},
        "required": [match[1] for match in matches if not match[3]],
        "type": "object",
    }
    return {"type": "function", "function": {"name": name, "description": filler(share), "parameters": parameters}}


def body(*messages: Json) -> Json:
    tools = [tool(line) for line in TOOLS.split("\n") if line]
    assert len(tools) == 37
    return {
        "stream": True,
        "model": "default",
        "messages": list(messages),
        "tools": tools,
        "stream_options": {"include_usage": True},
    }


def test_open_webuis_own_tools_fit_and_are_called(scripted: LiveServer) -> None:
    """In the context of the default model: 8,192 tokens, of which the tools take some 7,000."""
    asked = {"role": "user", "content": f"What did we say about Oslo? {CHAT_CALL}"}
    with scripted.client() as client:
        first = streamed(client, "/v1/chat/completions", body(asked))
        parts = [
            part for chunk in first for choice in chunk["choices"] for part in choice["delta"].get("tool_calls", ())
        ]
        arguments = "".join(part["function"].get("arguments", "") for part in parts)
        assert (parts[0]["function"]["name"], arguments) == ("search_chats", '{"query": "Oslo"}')
        # As it keeps a call, and sends it back with its result.
        called = {"index": 0, "id": parts[0]["id"], "type": "function"}
        called["function"] = {"name": "search_chats", "arguments": arguments}
        history: list[Json] = [
            asked,
            {"role": "assistant", "content": "", "tool_calls": [called]},
            {"role": "tool", "tool_call_id": parts[0]["id"], "content": f"[] {SUNNY}"},
        ]
        second = streamed(client, "/v1/chat/completions", body(*history))
    text = "".join(choice["delta"].get("content") or "" for chunk in second for choice in chunk["choices"])
    assert text == "It is sunny in Oslo."
    usage = second[-1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] * 0.9
