"""Reads one choice's answer as it arrives: reasoning, text and tool calls. Knows text only."""

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping

from ostro.answers.call_parsers import CallParser, Sink
from ostro.answers.events import CallArguments, CallBegin, Event, ParsedCall, Reasoning, Text
from ostro.answers.formats import CallFormat, HarmonyCalls
from ostro.answers.profile import ReasoningMarkers
from ostro.answers.scanner import Emit, Parse, Scanner
from ostro.answers.tools import Tool

# First keys of a call without a marker: it must be decided early whether an object is one.
_FIRST_KEYS = frozenset({"name", "type", "id"})
_FENCES = ("```json\n", "```\n")
_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 24
_SHORT_ID_LENGTH = 9


def new_id() -> str:
    return f"call_{_random(_ID_LENGTH)}"


def new_short_id() -> str:
    """An id in the form that Mistral's templates require."""
    return _random(_SHORT_ID_LENGTH)


def _random(length: int) -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(length))


class AnswerReader:
    """Feed it with `push` and finish with `end`. The joined events do not depend on how the text was split."""

    def __init__(
        self,
        *,
        markers: ReasoningMarkers | None = None,
        in_reasoning: bool = False,
        format: CallFormat | None = None,
        tools: Mapping[str, Tool] | None = None,
        max_calls: int | None = None,
        only_calls: bool = False,
        new_id: Callable[[], str] = new_id,
    ) -> None:
        """Without a format there are no calls. `tools`, by name, identify custom tools and the types of values; if the
        format has no marker, only these can be called. The answer is over after `max_calls` calls. With `only_calls`
        the output was constrained to calls, so a marker that is cut off by a limit is not text.
        """
        self.calls: list[ParsedCall] = []
        self.is_reasoning = in_reasoning
        """Whether the next text is reasoning, as far as is known."""
        self.was_cut = False
        self._format = format
        self._tools = tools or {}
        self._max_calls = max_calls
        self._only_calls = only_calls
        self._new_id = new_id
        self._markers = markers
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        # White space before a call is not text, so it is held back until the next text or call. In pieces: an answer
        # may consist of it, and joining it at each of a hundred thousand tokens would be quadratic.
        self._space: list[str] = []
        self._after_call = False
        self._needs_name = False
        self._events: list[Event] = []
        self._scanner = Scanner()
        self._parse = self._answer()
        next(self._parse)

    @property
    def text(self) -> str:
        """All text so far, without reasoning and calls."""
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        return "".join(self._thoughts)

    @property
    def has_open_call(self) -> bool:
        """Whether the answer was cut off within a call, or before the call that was required. A custom tool's input has
        no recognisable end, so it counts as open unless text follows.
        """
        if not self.was_cut or not self.calls:
            return self.was_cut and self._only_calls
        call = self.calls[-1]
        return self._after_call if call.is_custom else not _is_json(call.arguments)

    def push(self, text: str) -> list[Event]:
        """Takes the next text, and returns the events that are certain by now."""
        if text:
            self._scanner.feed(text)
            next(self._parse, None)
        return self._take()

    def end(self, cut: bool) -> list[Event]:
        """Returns the remaining events. `cut`: the output was cut off by a limit or a stop string, so incomplete parts
        are not the model's mistake.
        """
        self.was_cut = cut
        self._scanner.end()
        next(self._parse, None)
        if self._space and not self._after_call:
            self._add_text("", self._scanner.position)
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # Parsing.

    def _answer(self) -> Parse[None]:
        # Waits here for the first text.
        yield
        if self._format is not None and isinstance(self._format.calls, HarmonyCalls):
            parser = HarmonyParser(self._scanner, self, self._say, self._think, with_calls=bool(self._tools))
            yield from parser.answer()
            return
        if self.is_reasoning or (yield from self._reasoning_begins()):
            yield from self._reasoning()
            self.is_reasoning = False
        if self._format is None:
            yield from self._scanner.until((), self._say)
        else:
            yield from self._content(self._format)

    def _reasoning_begins(self) -> Parse[bool]:
        if self._markers is None:
            return False
        self._scanner.hold()
        yield from self._scanner.space()
        begins = yield from self._scanner.literal(self._markers.start)
        if begins:
            self._scanner.release()
            if self._markers.label:
                yield from self._scanner.literal(self._markers.label)
        else:
            self._scanner.go_back()
        self.is_reasoning = begins
        return begins

    def _reasoning(self) -> Parse[None]:
        """Reads reasoning up to its end marker, or up to a call if there is no end marker."""
        assert self._markers is not None
        end, begins = self._markers.end, self._format.begins if self._format is not None else ()
        # The line breaks next to the markers belong to the format.
        yield from self._scanner.literal("\n")
        while True:
            found = yield from self._scanner.until((end, *begins), self._think)
            if found is None:
                return
            if found != end:
                # Some models make calls without ending their reasoning, and some reason about calls. It is the latter
                # if the end marker still follows.
                self._scanner.hold(back=len(found))
                found = yield from self._scanner.until((end,), _ignore)
                if found is None and not self.was_cut:
                    self._scanner.go_back()
                    return
                self._think(self._scanner.held().removesuffix(found or ""))
                self._scanner.release()
            if found == end:
                yield from self._scanner.literal("\n")
                yield from self._scanner.literal("\n")
                return

    def _content(self, format: CallFormat) -> Parse[None]:
        if format.may_be_bare or not format.begin:
            yield from self._bare_calls(format)
        while not self._is_over:
            begin = yield from self._scanner.until(format.begins, self._say, self._say_begun)
            if begin is None:
                return
            self._scanner.hold(back=len(begin))
            yield from self._block(format, begin)
        yield from self._scanner.until((), _ignore)

    def _bare_calls(self, format: CallFormat) -> Parse[None]:
        """Reads calls without a marker at the beginning of the answer, if there are any."""
        self._needs_name = True
        self._scanner.hold()
        yield from self._scanner.space()
        fence = (yield from self._scanner.one_of(_FENCES)) if format.may_be_bare else None
        yield from self._block(format, "")
        if fence is not None and self.calls:
            yield from self._scanner.literal("```")
        self._needs_name = False

    def _block(self, format: CallFormat, begin: str) -> Parse[None]:
        """Reads calls and their end marker. If there are no calls, the begin marker is text."""
        before = len(self.calls)
        yield from CallParser(self._scanner, self).calls(format.calls)
        if len(self.calls) > before:
            yield from self._scanner.space()
            if format.ends and (yield from self._scanner.one_of(format.ends)) is None and self.was_cut:
                self._scanner.drop_begun(format.ends)
        elif not (self.was_cut and self._scanner.at_end):
            self._scanner.go_back()
            self._say(begin)
            self._scanner.take(len(begin))

    @property
    def _is_over(self) -> bool:
        return self._max_calls is not None and len(self.calls) >= self._max_calls

    # The sink of the parsers.

    def may_call(self, name: str) -> bool:
        return not self._is_over and (not self._needs_name or name in self._tools)

    def may_begin_with(self, key: str) -> bool:
        # Otherwise an answer that is some other JSON would be held back until it is complete.
        return not self._needs_name or key in _FIRST_KEYS

    def is_custom(self, name: str) -> bool:
        return name in self._tools and self._tools[name].is_custom

    def schema(self, name: str) -> Mapping[str, object]:
        return (self._tools[name].parameters or {}) if name in self._tools else {}

    def begin(self, name: str) -> None:
        if self._scanner.is_holding:
            self._scanner.release()
        self.is_reasoning = False
        self._space.clear()
        self._after_call = True
        call = ParsedCall(self._new_id(), name, is_custom=self.is_custom(name))
        self._events.append(CallBegin(len(self.calls), call.id, name, call.is_custom))
        self.calls.append(call)

    def arguments(self, text: str) -> None:
        self.calls[-1].pieces.append(text)
        self._events.append(CallArguments(len(self.calls) - 1, text))

    def _say(self, text: str) -> None:
        begin = self._scanner.position
        if self._after_call:
            begin += len(text) - len(text.lstrip())
            text = text.lstrip()
        kept = text if self._format is None else text.rstrip()
        if kept:
            self._add_text(kept, begin)
        if len(kept) < len(text):
            self._space.append(text[len(kept) :])

    def _add_text(self, text: str, begin: int) -> None:
        """Adds text, and before it the white space that was held back."""
        space = "".join(self._space)
        self._space.clear()
        self._after_call = False
        self._texts.append(space + text)
        self._events.append(Text(space + text, begin - len(space)))

    def _say_begun(self, text: str) -> None:
        """Takes an incomplete marker at the end of the answer. It is text, unless a limit cut it off where a call was
        expected.
        """
        if not self.was_cut or not (self.calls or self._only_calls):
            self._say(text)

    def _think(self, text: str) -> None:
        if text:
            self._thoughts.append(text)
            self._events.append(Reasoning(text))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _ignore(text: str) -> None:
    pass


CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_TO = " to="
_OPENINGS = (CHANNEL, START, MESSAGE, _TO)
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


class HarmonyParser:
    """Reads harmony, the format of gpt-oss: messages in channels, some of which are calls.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>
    """

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
