"""Reads harmony, the format of gpt-oss: messages in channels, some of which are calls.

<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…
<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>
"""

import re

from ostro.answers.call_parsers import CallParser, Sink
from ostro.answers.scanner import Emit, Parse, Scanner

CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_TO = " to="
_OPENINGS = (CHANNEL, START, MESSAGE, _TO)
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


class HarmonyParser:
    def __init__(self, scanner: Scanner, sink: Sink, say: Emit, think: Emit, *, with_calls: bool) -> None:
        self._scanner = scanner
        self._sink = sink
        self._say = say
        self._think = think
        self._with_calls = with_calls
        self._has_said = self._is_new = False

    def answer(self) -> Parse[None]:
        while (yield from self._scanner.peek()):
            yield from self._message()

    def _message(self) -> Parse[None]:
        self._scanner.hold()
        opening = yield from self._scanner.one_of(_OPENINGS)
        if opening is not None:
            self._scanner.release()
        else:
            # Text from a model that does not follow the format.
            self._scanner.go_back()
            if self._sink.was_cut:
                self._scanner.drop_begun(_OPENINGS)
            opening = yield from self._scanner.until((CHANNEL, START), self._say)
        header = [opening or ""]
        if (yield from self._scanner.until((MESSAGE,), header.append)) is None and opening != MESSAGE:
            return
        yield from self._body("".join(header))

    def _body(self, header: str) -> Parse[None]:
        call = _RECIPIENT.search(header)
        if call is not None and self._with_calls:
            yield from self._scanner.space()
            yield from CallParser(self._scanner, self._sink).arguments(call[1])
            yield from self._scanner.until(_ENDS, lambda text: None)
            return
        is_said = call is not None or (_TO not in header and "analysis" not in header)
        if not is_said:
            yield from self._scanner.until(_ENDS, self._think)
            return
        self._is_new = True
        yield from self._scanner.until(_ENDS, self._say_next)

    def _say_next(self, text: str) -> None:
        """Makes each message for the user a paragraph of its own."""
        if self._is_new and self._has_said:
            self._say("\n\n")
        self._is_new, self._has_said = False, True
        self._say(text)
