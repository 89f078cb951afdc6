"""Prompts as token ids, without a tokenizer: as many as the server would count, and equal where texts are equal.

Only how many tokens there are and which prompts begin alike matters to an engine that computes nothing. So a token is a
hash of its word, and every word has the average number of tokens.
"""

from functools import cache
from hashlib import blake2b
from typing import NamedTuple
from zlib import crc32

import msgspec

from ostro.measure.bench.workload import Messages, Workload
from ostro.simulation.costs import EndpointCosts


class Prompt(NamedTuple):
    token_ids: tuple[int, ...]
    num_history: int
    """Tokens that an earlier request may have left in a cache: those before the model's last answer."""
    answer: tuple[int, ...] = ()
    """The generated tokens, as far as they are known: a later turn of the conversation begins with both."""


class PromptTokens:
    def __init__(self, costs: EndpointCosts, vocab_size: int) -> None:
        self._per_word = costs.tokens_per_word
        self._vocab = vocab_size
        self._before = self._of_template("before", costs.tokens_before)
        self._after = self._of_template("after", costs.tokens_after)
        # Cached, because words repeat and prompts are long.
        self._hash = cache(self._hashed)

    def of(self, prompt: str | Messages | list[int], answer: str | None = None) -> Prompt:
        """At least one token. Ids are taken as they are, within the vocabulary."""
        history: int | None = None
        if isinstance(prompt, str):
            found = [*self._before, *self._of_text(prompt), *self._after]
        elif all(isinstance(each, int) for each in prompt):
            found = [each % self._vocab for each in prompt if isinstance(each, int)]
        else:
            found = list(self._before)
            for message in prompt:
                assert isinstance(message, dict)
                if message.get("role") == "assistant":
                    history = len(found)
                found += [*self._of_text(_text(message)), *self._after]
        said = () if answer is None else (*self._of_text(answer), *self._after)
        return Prompt(tuple(found) or (0,), len(found) if history is None else history, said)

    def _of_text(self, text: str) -> list[int]:
        words = text.split()
        if self._per_word == 1.0:
            return [self._hash(word) for word in words]
        count = round(len(words) * self._per_word)
        # A token depends on its position and word only, whatever follows: texts that begin alike share tokens.
        return [
            (self._hash(words[min(int(k / self._per_word), len(words) - 1)]) + k) % self._vocab for k in range(count)
        ]

    def _of_template(self, name: str, count: int) -> list[int]:
        return [self._hashed(f"\0{name} {number}") for number in range(count)]

    def _hashed(self, word: str) -> int:
        return crc32(word.encode(errors="replace")) % self._vocab


class Answers:
    """The answers in a load's conversations, by the messages before them."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._known: dict[bytes, str] = {}
        for item in workload.items:
            digest = b""
            for message in item.prompt if isinstance(item.prompt, list) else ():
                if message.get("role") == "assistant":
                    self._known[digest] = _text(message)
                digest = _chained(digest, message)

    def of(self, index: int, level: int, prompt: str | Messages | list[int]) -> str | None:
        """The answer; None if no later turn contains it."""
        found = self._workload.answer(index, level)
        if found is not None or not self._known or isinstance(prompt, str):
            return found
        digest = b""
        for message in prompt:
            digest = _chained(digest, message)
        return self._known.get(digest)


def _chained(digest: bytes, message: object) -> bytes:
    return blake2b(digest + msgspec.json.encode(message), digest_size=16).digest()


def _text(message: dict[str, object]) -> str:
    """A message's role and text; parts other than text count for nothing."""
    content = message.get("content")
    if isinstance(content, list):
        content = " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
