"""One HTTP request on its way from the ingress to a replica, and what its place is chosen by. Knows ASGI and the shape
of prompts; knows no replicas.
"""

import hashlib
import re
from dataclasses import dataclass

from pydantic_core import from_json
from starlette.types import Scope

from ostro.server.models import ANY

BLOCK = 128
"""Characters: some two pages of tokens on a CPU, half of one on a GPU."""
_MOST_BLOCKS = 512
_DIGEST_BYTES = 8
_MODEL_PATH = re.compile(r"/v1/(?!chat/completions)(?P<model>.+?)(/chat)?/completions")
_PROMPT_FIELDS = ("prompt", "prompts", "input")
# Between role and content, and after a message: no text holds them by chance.
_ROLE_END, _MESSAGE_END = "\x1f", "\x1e"


@dataclass(frozen=True, slots=True)
class Key:
    """What a request's place is chosen by: its model, and its prompt as a chain of digests, each over all before it."""

    model: str = ANY
    blocks: tuple[bytes, ...] = ()
    num_history: int = 0
    """How many of the blocks an earlier request may have left in a cache: not the model's last answer, nor what was
    said after it.
    """


@dataclass(frozen=True, slots=True)
class Call:
    method: str
    path: str
    raw_path: bytes
    query_string: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    client: tuple[str, int] | None
    body: bytes
    key: Key = Key()

    @classmethod
    def of(cls, scope: Scope, body: bytes = b"", key: Key = Key()) -> "Call":  # noqa: B008  it is frozen
        """Without the prefix that the application has in Serve: keys guard paths as the server has them."""
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


def key_of(path: str, body: bytes) -> Key:
    """Of a request. One that makes no sense has a key too: to refuse it is up to the replica."""
    try:
        asked = from_json(body)
    except ValueError:
        return Key()
    if not isinstance(asked, dict):
        return Key()
    in_path = _MODEL_PATH.fullmatch(path)
    model = asked.get("model") if in_path is None else in_path["model"]
    model = model if isinstance(model, str) else ANY
    text, history = _conversation(asked["messages"]) if "messages" in asked else _prompt(asked)
    salt = f"{model}{_MESSAGE_END}{asked.get('cache_salt') or ''}"
    return Key(model, blocks_of(text, salt), min(history // BLOCK, _MOST_BLOCKS))


def blocks_of(text: str, salt: str = "") -> tuple[bytes, ...]:
    """The chain of digests of a text's full blocks: two texts have as many in common as they begin alike."""
    last, blocks = hashlib.blake2b(salt.encode(errors="replace"), digest_size=_DIGEST_BYTES).digest(), []
    for begin in range(0, min(len(text) // BLOCK, _MOST_BLOCKS) * BLOCK, BLOCK):
        block = text[begin : begin + BLOCK].encode(errors="replace")
        last = hashlib.blake2b(last + block, digest_size=_DIGEST_BYTES).digest()
        blocks.append(last)
    return tuple(blocks)


def _conversation(messages: object) -> tuple[str, int]:
    """Its text, and how much of that comes before the last answer."""
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
    """Of several, the first."""
    prompt = next((asked[name] for name in _PROMPT_FIELDS if name in asked), "")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    # Token ids, in place of a text; of a long list no more than counts.
    text = " ".join(map(str, prompt[: _MOST_BLOCKS * BLOCK])) if isinstance(prompt, list) else str(prompt)
    return text, len(text)
