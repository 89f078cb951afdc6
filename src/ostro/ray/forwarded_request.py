"""An HTTP request on its way from the ingress to a replica, and the key for choosing the replica. Knows ASGI and the
format of prompts; knows no replicas.
"""

import asyncio
import re
from dataclasses import dataclass

from pydantic_core import from_json
from starlette.types import Scope

from ostro.routing.key import BLOCK, MOST_BLOCKS, Key, blocks_of
from ostro.server.models.served import ANY

_MODEL_PATH = re.compile(r"/v1/(?!chat/completions)(?P<model>.+?)(/chat)?/completions")
_PROMPT_FIELDS = ("prompt", "prompts", "input")
# Separators after a role and after a message; they do not occur in ordinary text.
_ROLE_END, _MESSAGE_END = "\x1f", "\x1e"
_LONGEST_NAME = 256
# Short bodies are parsed faster than a thread wakes up; very long ones are not parsed, and go to the least loaded.
_LONG_BODY, _LONGEST_READ = 64 << 10, 2 << 20
NO_KEY = Key(ANY)
"""The key of a request that says nothing to route by."""


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    method: str
    path: str
    raw_path: bytes
    query_string: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    client: tuple[str, int] | None
    body: bytes
    key: Key = NO_KEY

    @classmethod
    def of(cls, scope: Scope, body: bytes = b"", key: Key = NO_KEY) -> "ForwardedRequest":
        """Strips the application's Serve prefix: API keys protect paths as the server sees them."""
        root = scope.get("root_path", "")
        raw = bytes(scope.get("raw_path") or scope["path"].encode())
        client = scope.get("client")
        return cls(
            method=scope["method"],
            path=scope["path"].removeprefix(root) or "/",
            raw_path=raw.removeprefix(root.encode()) or b"/",
            query_string=bytes(scope.get("query_string", b"")),
            headers=tuple((bytes(name), bytes(value)) for name, value in scope["headers"]),
            client=None if client is None else (client[0], client[1]),
            body=body,
            key=key,
        )

    def scope(self) -> Scope:
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "scheme": "http",
            "method": self.method,
            "path": self.path,
            "raw_path": self.raw_path,
            "root_path": "",
            "query_string": self.query_string,
            "headers": list(self.headers),
            "client": self.client,
            "server": None,
            "state": {},
        }


async def read_key(path: str, body: bytes, *, is_whole: bool = True) -> Key:
    """`key_of`, off the event loop if that takes longer than a thread takes to wake up."""
    if not body or len(body) > _LONGEST_READ:
        return NO_KEY
    if len(body) <= _LONG_BODY:
        return key_of(path, body, is_whole=is_whole)
    return await asyncio.to_thread(key_of, path, body, is_whole=is_whole)


def key_of(path: str, body: bytes, *, is_whole: bool = True) -> Key:
    """A request's key. An invalid request gets one too: refusing it is up to the replica. The beginning of a truncated
    body is enough.
    """
    try:
        asked = (
            from_json(body) if is_whole else from_json(body.decode(errors="ignore"), allow_partial="trailing-strings")
        )
    except ValueError:
        return NO_KEY
    if not isinstance(asked, dict):
        return NO_KEY
    in_path = _MODEL_PATH.fullmatch(path)
    model = asked.get("model") if in_path is None else in_path["model"]
    model = model[:_LONGEST_NAME] if isinstance(model, str) else ANY
    text, history = _conversation(asked["messages"]) if "messages" in asked else _prompt(asked)
    salt = f"{model}{_MESSAGE_END}{asked.get('cache_salt') or ''}"
    return Key(model, blocks_of(text, salt), min(history // BLOCK, MOST_BLOCKS))


def _conversation(messages: object) -> tuple[str, int]:
    """Its text, and the length of the part before the last answer."""
    text, before_answer = "", None
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            break
        if message.get("role") == "assistant":
            before_answer = len(text)
        text += f"{message.get('role')}{_ROLE_END}{_content(message.get('content'))}{_MESSAGE_END}"
    return text, len(text) if before_answer is None else before_answer


def _content(content: object) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _prompt(asked: dict[str, object]) -> tuple[str, int]:
    """If there are several prompts, the first."""
    prompt = next((asked[name] for name in _PROMPT_FIELDS if name in asked), "")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    # A list of token ids instead of text; truncated to the part that counts.
    text = " ".join(map(str, prompt[: MOST_BLOCKS * BLOCK])) if isinstance(prompt, list) else str(prompt)
    return text, len(text)
