"""How one request wants its tokens chosen. Frozen, and validated once, at the edge.

The ranges are OpenAI's where OpenAI has the field, else those of the servers its users come from.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any, Self

from ostro.errors import BadRequest

MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_CHOICES = 128
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_STOP_CHARACTERS = 1 << 16
"""Over all stop strings."""
MAX_BAD_WORD_CHARACTERS = 1 << 14
"""Over all bad words, which are tokenised."""
MAX_SEED = 2**63 - 1

NEUTRAL: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""Fields for which a model may bring its own default, and their values where it brings none."""

# What a caller leaves out, or sets to None. It is never seen in an instance, whose fields are always numbers.
_OPEN: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling settings. A field outside its range raises BadRequest that names it."""

    n: int = 1
    """How many choices to generate; the prompt is computed once for all of them."""
    max_tokens: int | None = 16
    """Most tokens to generate; 0 generates none (scoring). None sets no limit: the output may grow to
    `default_max_tokens`, or fill the context, and one that runs in a loop ends, unless `ignore_eos`."""
    default_max_tokens: int | None = None
    """Most tokens where max_tokens is None, and fewer if the context has less room. None is the model's own default."""
    min_tokens: int = 0
    """No end-of-sequence or stop before this many tokens."""
    temperature: float = _OPEN
    """0 is greedy. Left out, this and the next four are the model's own defaults, else `NEUTRAL`."""
    top_p: float = _OPEN
    top_k: int = _OPEN
    """0 or -1 keeps all tokens."""
    min_p: float = _OPEN
    repetition_penalty: float = _OPEN
    """Over prompt and output, as in the CTRL paper; 1 is off."""
    presence_penalty: float = 0.0
    """Over the output only, once for each token that occurred; likewise frequency_penalty, by its count."""
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    bad_words: tuple[str, ...] = ()
    """Words whose usual tokens, with and without a space before them, must not follow one another in the output."""
    seed: int | None = None
    """Same seed, same tokens, whatever else runs. None draws a fresh seed."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Log-probabilities of each generated token and of this many most likely alternatives."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens; the first has none."""
    truncate_prompt_tokens: int | None = None
    """Keep so many of the prompt's last tokens; -1 keeps what the context leaves beside the output."""
    skip_special_tokens: bool = True
    include_stop_in_output: bool = False
    unset: frozenset[str] = field(init=False, repr=False, compare=False, default=frozenset())
    """Fields that were left out and hold their neutral values: a model's defaults may replace these."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "unset", frozenset(name for name in NEUTRAL if getattr(self, name) is None))
        for name in self.unset:
            object.__setattr__(self, name, NEUTRAL[name])
        if self.max_tokens is not None:
            object.__setattr__(self, "default_max_tokens", None)
        for name in ("stop", "bad_words", "stop_token_ids"):
            object.__setattr__(self, name, _entries(name, getattr(self, name)))
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        self._check_flags()
        self._check_integers()
        self._check_numbers()
        self._check_collections()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def with_changes(self, **changes: object) -> Self:
        """A validated copy with some fields changed; what was left out before still is."""
        given = {each.name for each in fields(self) if each.init} - self.unset
        return type(self)(**({name: getattr(self, name) for name in given} | changes))

    def without_texts(self) -> Self:
        """A copy without stop strings and bad words. Not validated again: a large logit_bias makes that slow."""
        bare = copy(self)
        for name in ("stop", "bad_words"):
            object.__setattr__(bare, name, ())
        return bare

    def _check_integers(self) -> None:
        _integer("n", self.n, 1, MAX_CHOICES)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0, None)
        if self.default_max_tokens is not None:
            _integer("default_max_tokens", self.default_max_tokens, 1, None)
        _integer("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _bad("min_tokens", f"must not exceed max_tokens ({self.max_tokens}), got {self.min_tokens}")
        _integer("top_k", self.top_k, 0, None)
        if self.seed is not None:
            _integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        if self.truncate_prompt_tokens is not None:
            _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, None)
            if self.truncate_prompt_tokens == 0:
                raise _bad("truncate_prompt_tokens", "must be -1 or at least 1: a prompt has at least one token")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _integer(name, value, 0, MAX_LOGPROBS)

    def _check_flags(self) -> None:
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, f"must be true or false, got {getattr(self, name)!r}")

    def _check_numbers(self) -> None:
        _number("temperature", self.temperature, 0.0, 2.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise _bad("top_p", "must be greater than 0; for greedy decoding set temperature to 0")
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 10.0)
        if self.repetition_penalty == 0.0:
            raise _bad("repetition_penalty", "must be greater than 0; 1 turns it off")
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)

    def _check_collections(self) -> None:
        for name, most, most_characters in (
            ("stop", MAX_STOPS, MAX_STOP_CHARACTERS),
            ("bad_words", MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS),
        ):
            texts = getattr(self, name)
            if len(texts) > most:
                raise _bad(name, f"takes at most {most} entries, got {len(texts)}")
            for text in texts:
                if not isinstance(text, str) or not text:
                    raise _bad(name, f"must hold non-empty strings, got {text!r}")
            if (length := sum(map(len, texts))) > most_characters:
                raise _bad(name, f"takes at most {most_characters} characters over all entries, got {length}")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise _bad("stop_token_ids", f"takes at most {MAX_STOP_TOKEN_IDS} entries")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, None)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise _bad("logit_bias", f"takes at most {MAX_LOGIT_BIAS} entries, got {len(self.logit_bias)}")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, None)
            _number("logit_bias", bias, -100.0, 100.0)


def _bad(name: str, what: str) -> BadRequest:
    return BadRequest(f"{name} {what}.", param=name)


def _entries(name: str, value: object) -> tuple[object, ...]:
    # None, lists and a lone string are what people write; tuples are what a frozen object keeps.
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple | set | frozenset):
        raise _bad(name, f"must be a list, got {value!r}")
    return tuple(value)


def _bias(value: object) -> dict[object, object]:
    if value is not None and not isinstance(value, Mapping):
        raise _bad("logit_bias", f"must map token ids to numbers, got {value!r}")
    return dict(value or {})


def _integer(name: str, value: object, low: int, high: int | None) -> None:
    # bool is an int to Python, and a mistake here.
    if not isinstance(value, int) or isinstance(value, bool):
        raise _bad(name, f"must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        raise _bad(name, f"must be {'at least ' + str(low) if high is None else f'from {low} to {high}'}, got {value}")


def _number(name: str, value: object, low: float, high: float) -> None:
    # Not a number is in no range, and so is an integer that no float can hold.
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise _bad(name, f"must be a number from {low:g} to {high:g}, got {value!r}")
