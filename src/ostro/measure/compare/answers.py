"""A side's answers with their timing: plain data, and the recorder that assembles it."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Message = Mapping[str, object]
Prompt = str | tuple[Message, ...]
"""A text to continue, or a conversation to answer."""


@dataclass(frozen=True, slots=True)
class Token:
    text: str
    """Text in OpenAI's notation: `bytes:\\xf0\\x9f` if it is not whole characters and its bytes are known."""
    id: int | None = None
    """The token's id; None if the side reports none, and tokens are compared by text."""
    logprob: float | None = None


def token_name(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    text: str
    seconds: float
    arrivals: tuple[float, ...] = ()
    """Arrival time of each part of the text, in seconds after the request was sent."""
    tokens: tuple[Token, ...] = ()
    """The answer's tokens; empty if the side reports none."""
    counted: int | None = None
    """The side's own token count."""
    finish_reason: str | None = None

    @property
    def num_tokens(self) -> int:
        """The side's own count; otherwise the number of parts, which on most servers are tokens."""
        return self.counted if self.counted is not None else len(self.tokens) or len(self.arrivals)

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return self.arrivals[0] if self.arrivals else None

    @property
    def token_seconds(self) -> float | None:
        """Mean seconds between tokens; None for fewer than two."""
        if len(self.arrivals) < 2 or self.num_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Failure:
    error: str
    seconds: float


Outcome = Answer | Failure


class Recorder:
    """Assembles one answer as it arrives. Its clock starts when it is created, or at `start`."""

    def __init__(self) -> None:
        self.text = ""
        self.finish_reason: str | None = None
        self.counted: int | None = None
        self._tokens: list[Token] = []
        self._arrivals: list[float] = []
        self.start()

    def start(self) -> None:
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def add(self, text: str, tokens: Iterable[Token] = ()) -> None:
        """Records what has just arrived; an empty part does not count as an arrival."""
        known = len(self._tokens)
        self._tokens += tokens
        self.text += text
        if text or len(self._tokens) > known:
            self._arrivals.append(self.seconds)

    def answer(self) -> Answer:
        return Answer(
            text=_joined(self.text),
            seconds=self.seconds,
            arrivals=tuple(self._arrivals),
            tokens=tuple(self._tokens),
            counted=self.counted,
            finish_reason=self.finish_reason,
        )

    def failure(self, error: str) -> Failure:
        return Failure(error, self.seconds)


def _joined(text: str) -> str:
    """Joins surrogate halves that came in two parts; a lone half is replaced."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
