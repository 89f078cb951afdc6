"""Assembles the messages of a chat request from the smaller items or blocks of the other dialects.

Both dialects split an assistant's turn: text, reasoning and calls are separate items or blocks. Chat templates expect
whole turns.
"""

from ostro.errors import BadRequest
from ostro.text.chat import Message

# Between the parts of one message, as the renderer joins them; and between messages that become one.
_PARTS, _MESSAGES = "\n", "\n\n"


class Turns:
    """Add everything in order, then call `messages`."""

    def __init__(self, *, merges: bool) -> None:
        """`merges`: whether neighbouring messages of any one role are merged. An assistant's always are, and so are
        system messages at the very beginning: many templates accept only one.
        """
        self._merges = merges
        self._done: list[dict[str, object]] = []
        self._open: dict[str, object] | None = None
        self._calls: set[str] = set()

    def messages(self) -> list[Message]:
        self._end()
        return list(self._done)

    def say(self, role: str, texts: list[str]) -> None:
        """Adds one message of `user`, `assistant` or `system`, given its parts. An empty message still makes a turn."""
        turn = self._turn(role)
        turn["content"] = _joined(turn["content"], _PARTS.join(texts))

    def reason(self, text: str) -> None:
        """Adds reasoning to the assistant's turn."""
        if text:
            turn = self._turn("assistant")
            turn["reasoning_content"] = _joined(turn.get("reasoning_content", ""), text)

    def call(self, id: str, name: str, arguments: str, *, is_custom: bool = False) -> None:
        """Adds a call to the assistant's turn. A custom tool has an input in place of JSON arguments."""
        kind, given = ("custom", "input") if is_custom else ("function", "arguments")
        calls = self._turn("assistant").setdefault("tool_calls", [])
        assert isinstance(calls, list)
        calls.append({"id": id, "type": kind, kind: {"name": name, given: arguments}})
        self._calls.add(id)

    def result(self, id: str, texts: list[str], *, param: str) -> None:
        """Adds a call's result. Raises BadRequest that names `param` if there was no such call."""
        if id not in self._calls:
            raise BadRequest(
                f"{param} is {id[:64]!r}, and no call before it has that id. Send the call too.", param=param
            )
        self._end()
        self._done.append({"role": "tool", "tool_call_id": id, "content": _PARTS.join(texts)})

    def _turn(self, role: str) -> dict[str, object]:
        merges = self._merges or role == "assistant" or (role == "system" and not self._done)
        if self._open is None or self._open["role"] != role or not merges:
            self._end()
            self._open = {"role": role, "content": ""}
        return self._open

    def _end(self) -> None:
        if self._open is not None:
            self._done.append(self._open)
            self._open = None


def _joined(*texts: object) -> str:
    return _MESSAGES.join(text for text in texts if isinstance(text, str) and text)
