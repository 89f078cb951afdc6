"""The requests of a load test: their bodies and when they are due.

Request `i` depends only on the seed, the level and `i`: any process can build any request of a run, and the same seed
gives the same load.
"""

import itertools
import random
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

Messages = list[dict[str, Any]]
Endpoint = Literal["chat", "completions"]

PATHS: dict[Endpoint, str] = {"chat": "/chat/completions", "completions": "/completions"}

# Short and common, so that most tokenizers have each as one token; the actual token counts are measured anyway.
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business side kind head house service friend father power hour "
    "game line end member law car city name team minute idea body back parent face level office door health person art "
    "war history party result change morning reason research girl guy moment air teacher force order light voice paper "
    "green small large next early young old high long little own other good new first last great big"
)
WORDS = _WORDS.split()
# Indexed by byte: drawing bytes is many times faster than choosing words, and each turn redraws its conversation.
_WORD_BY_BYTE = [WORDS[byte % len(WORDS)] for byte in range(256)]


class Span(msgspec.Struct, frozen=True):
    """Integers from `low` to `high`, equally likely."""

    low: int
    high: int

    def draw(self, dice: random.Random) -> int:
        return dice.randint(self.low, self.high)

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low}-{self.high}"


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """A request from a file. Missing values are drawn at random."""

    prompt: str | Messages | None = None
    input_len: int | None = None
    output_len: int | None = None
    at: float = 0.0
    """Time at which it is due, in a trace."""
    earlier: list[int] | None = None
    """Items of the conversation's earlier turns; None outside a conversation. A turn's length is its own."""


class WordTokens(msgspec.Struct, frozen=True, kw_only=True):
    """How the server's tokenizer counts our words."""

    per_word: float = 1.0
    around: float = 0.0
    """Tokens that a chat template adds to every prompt."""

    def words_for(self, tokens: float) -> int:
        return max(round(tokens / self.per_word), 0)


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    endpoint: Endpoint = "chat"
    model: str = ""
    output_len: Span
    items: list[Item] = []
    """Requests from a file, used in turn; if empty, prompts are random."""
    input_len: Span = Span(1, 1)
    shared_prefix: int = 0
    vocab_size: int | None = None
    """If set, random prompts are token ids instead of words."""
    speed: float = 1.0
    """Speed-up factor for replaying a trace."""
    ignore_eos: bool = False
    include_usage: bool = True
    body: dict[str, Any] = {}
    """Extra fields for every request; they override all others."""
    words: WordTokens = WordTokens()
    seed: int = 0

    def request(self, index: int, level: int = 0) -> tuple[bytes, int]:
        """The body of request `index`, and its max_tokens; 0 if unset."""
        return self.body_of(*self.prompt(index, level))

    def prompt(self, index: int, level: int = 0) -> tuple[str | Messages | list[int], int]:
        """The prompt of request `index`, and how many tokens it asks for."""
        item = self.items[index % len(self.items)] if self.items else Item()
        input_len, output_len = self._lengths(index, item)
        if item.earlier is not None:
            return self._turns(index, level, item.earlier), output_len
        dice = random.Random(f"{self.seed}/{level}/{index}")
        return self._random(input_len, dice) if item.prompt is None else item.prompt, output_len

    def answer(self, index: int, level: int = 0) -> str | None:
        """The answer to request `index` that later turns of its conversation contain; None outside a conversation."""
        item = self.items[index % len(self.items)] if self.items else Item()
        if item.earlier is None:
            return None
        return self._said(f"{self.seed}/{level}/{index}/answer", self._lengths(index, item)[1])

    def _lengths(self, index: int, item: Item) -> tuple[int, int]:
        # Lengths are the same at each level, but words differ: the last level's prompts may be in the server's cache.
        lengths = random.Random(f"{self.seed}/lengths/{index}")
        input_len = self.input_len.draw(lengths) if item.input_len is None else item.input_len
        output_len = self.output_len.draw(lengths) if item.output_len is None else item.output_len
        return input_len, output_len

    def _turns(self, index: int, level: int, earlier: list[int]) -> Messages:
        found: Messages = []
        first = index - index % len(self.items)
        for turn in (*(first + each for each in earlier), index):
            tokens, _ = self._lengths(turn, self.items[turn % len(self.items)])
            found.append({"role": "user", "content": self._said(f"{self.seed}/{level}/{turn}", tokens)})
            if turn != index:
                found.append({"role": "assistant", "content": self.answer(turn, level)})
        return found

    def _said(self, seed: str, tokens: int) -> str:
        drawn = random.Random(seed).randbytes(max(self.words.words_for(tokens), 1))
        return " ".join([_WORD_BY_BYTE[byte] for byte in drawn])

    def body_of(self, prompt: str | Messages | list[int], max_tokens: int) -> tuple[bytes, int]:
        fields: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "stream": True}
        if self.include_usage:
            fields["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.endpoint == "chat":
            fields["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        else:
            fields["prompt"] = prompt
        fields |= self.body
        most = fields["max_tokens"]
        return msgspec.json.encode(fields), most if isinstance(most, int) else 0

    def due(self, rate: float, burstiness: float, level: int) -> Iterator[float]:
        """When requests are due, endlessly: `rate` per second on average.

        Gaps follow a gamma distribution of shape `burstiness`: 1 is a Poisson process, less is bursty.
        """
        dice = random.Random(f"{self.seed}/arrivals/{level}")
        return itertools.accumulate(dice.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in itertools.count())

    @property
    def has_random_prompts(self) -> bool:
        return not self.items or any(item.prompt is None for item in self.items)

    def replayed(self) -> Iterator[float]:
        """When a trace's requests are due."""
        return (item.at / self.speed for item in self.items)

    def _random(self, tokens: int, dice: random.Random) -> str | list[int]:
        shared = random.Random(f"{self.seed}/shared")
        if self.vocab_size is not None:
            prefix = [shared.randrange(self.vocab_size) for _ in range(self.shared_prefix)]
            return prefix + [dice.randrange(self.vocab_size) for _ in range(tokens)]
        prefix_words = self.words.words_for(self.shared_prefix)
        own_words = max(self.words.words_for(tokens - self.words.around), 1)
        return " ".join([*shared.choices(WORDS, k=prefix_words), *dice.choices(WORDS, k=own_words)])
