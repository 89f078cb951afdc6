"""One request's sampling settings: frozen, and validated once, at the edge.

This is the single definition of every sampling parameter: its default, range and meaning. Request schemas, command-line
options, client keyword arguments and the tables in the docs are generated from it. Ranges are OpenAI's where OpenAI has
the field, otherwise those of the servers that users come from.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from math import inf, nextafter
from typing import Any, Self, TypedDict

from ostro.errors import BadRequest
from ostro.structured import StructuredOutput

MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_CHOICES = 128
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_STOP_CHARACTERS = 1 << 16
"""Characters over all stop strings."""
MAX_BAD_WORD_CHARACTERS = 1 << 14
"""Characters over all bad words, which are tokenised."""
MAX_WORD_CHARACTERS = 1024
"""Characters per stop string or bad word in an HTTP request."""
MAX_SEED = 2**63 - 1

# The default of fields in NEUTRAL, which replaces it: in an instance these are always numbers.
_OPEN: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """Metadata of a field of SamplingParams."""

    meaning: str
    """Description, which reads well after a range and on its own in `--help`."""
    low: float | None = None
    high: float | None = None
    not_low: str | None = None
    """Advice for a value equal to `low`, if `low` itself is out of range."""
    neutral: float | None = None
    """The value of a field that was left out, if the model has no default of its own. None: models may not set one."""
    is_option: bool = False
    """Whether commands take it as an option."""
    wire_name: str | None = None
    """Its name in requests, if different."""

    @property
    def description(self) -> str:
        """Its range, its meaning, and what happens if it is left out."""
        words = self.meaning
        # A seed's range is that of its type: not worth mentioning.
        if self.low is not None and self.high is not None and self.high < MAX_SEED:
            least = f"{self.low:g} to" if self.not_low is None else f"above {self.low:g}, up to"
            words = f"{least} {self.high:g}; {words}"
        otherwise = "" if self.neutral is None else f". None is the model's own default, otherwise {self.neutral:g}"
        return words[0].upper() + words[1:] + otherwise


def _parameter(default: Any, meaning: str, **rest: Any) -> Any:
    """A field of SamplingParams."""
    metadata = {"parameter": Parameter(meaning=meaning, **rest)}
    if isinstance(default, dict):
        return field(default_factory=dict, hash=False, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling settings. A field outside its range raises BadRequest that names it."""

    n: int = _parameter(
        1,
        "number of choices to generate; the prompt is computed once for all of them",
        low=1,
        high=MAX_CHOICES,
        is_option=True,
    )
    max_tokens: int | None = _parameter(
        16, "maximum number of tokens to generate; 0 generates none, to score the prompt only", low=0, is_option=True
    )
    """None sets no limit: the output may grow to `default_max_tokens` or fill the context. One that is stuck in a loop
    ends, unless `ignore_eos` is set."""
    default_max_tokens: int | None = _parameter(
        None, "limit that applies if max_tokens is None, or less if the context has less room", low=1
    )
    """None is the model's own default."""
    min_tokens: int = _parameter(
        0, "suppress end-of-sequence and stops until this many tokens have been generated", low=0, is_option=True
    )
    temperature: float = _parameter(
        _OPEN, "sampling temperature; 0 is greedy", low=0, high=2, neutral=1.0, is_option=True
    )
    top_p: float = _parameter(
        _OPEN,
        "nucleus sampling: keep the most likely tokens whose probabilities add up to this",
        low=0,
        high=1,
        not_low="for greedy decoding set temperature to 0",
        neutral=1.0,
        is_option=True,
    )
    top_k: int = _parameter(
        _OPEN, "keep this many of the most likely tokens; 0 and -1 keep all", low=0, neutral=0, is_option=True
    )
    min_p: float = _parameter(
        _OPEN,
        "keep tokens at least this likely, relative to the most likely one",
        low=0,
        high=1,
        neutral=0.0,
        is_option=True,
    )
    top_n_sigma: float = _parameter(
        0.0,
        "keep tokens whose logit is at most this many standard deviations of all logits below the highest; 0 keeps all",
        low=0,
        high=100,
        is_option=True,
    )
    repetition_penalty: float = _parameter(
        _OPEN,
        "penalise tokens that occur in the prompt or output, as in the CTRL paper; 1 is off",
        # Scores are divided by it in single precision: by much less than this, they overflow.
        low=0.01,
        high=10,
        neutral=1.0,
        is_option=True,
    )
    presence_penalty: float = _parameter(
        0.0, "penalise tokens that occur in the output, once for each token", low=-2, high=2, is_option=True
    )
    frequency_penalty: float = _parameter(
        0.0, "penalise tokens in proportion to how often they occur in the output", low=-2, high=2, is_option=True
    )
    logit_bias: Mapping[int, float] = _parameter(
        {}, f"number from -100 to 100 to add to a token's logit, by token id; at most {MAX_LOGIT_BIAS} of them"
    )
    bad_words: tuple[str, ...] = _parameter(
        (),
        "words that must not appear in the output, as their usual tokenisation with or without a leading space; at "
        f"most {MAX_BAD_WORDS} of them, each at most {MAX_WORD_CHARACTERS} characters long in a request, and "
        f"{MAX_BAD_WORD_CHARACTERS} characters in total",
    )
    seed: int | None = _parameter(
        None,
        "the same seed gives the same tokens, whatever else is running; without one, a random seed is drawn",
        low=-MAX_SEED - 1,
        high=MAX_SEED,
        is_option=True,
    )
    stop: tuple[str, ...] = _parameter(
        (),
        f"stop before any of these strings; at most {MAX_STOPS} of them, each at most {MAX_WORD_CHARACTERS} characters "
        "long in a request",
        is_option=True,
    )
    stop_token_ids: tuple[int, ...] = _parameter(
        (), f"stop after any of these tokens; at most {MAX_STOP_TOKEN_IDS} of them"
    )
    ignore_eos: bool = _parameter(False, "keep generating past the end-of-sequence token", is_option=True)
    logprobs: int | None = _parameter(
        None,
        "return the log-probability of each generated token and of this many most likely alternatives",
        low=0,
        high=MAX_LOGPROBS,
    )
    prompt_logprobs: int | None = _parameter(
        None,
        "return the log-probability of each prompt token but the first and of this many alternatives; not in a stream",
        low=0,
        high=MAX_LOGPROBS,
    )
    truncate_prompt_tokens: int | None = _parameter(
        None,
        "keep only this many tokens at the end of the prompt, at least 1; -1 keeps as many as fit next to the output",
        low=-1,
        is_option=True,
    )
    skip_special_tokens: bool = _parameter(True, "leave special tokens out of the output text")
    include_stop_in_output: bool = _parameter(
        False, "include the stop string or token at the end of the output text", wire_name="include_stop_str_in_output"
    )
    structured: StructuredOutput | None = _parameter(  # noqa: RUF009 - a field, as all the others
        None, "what the output must look like: JSON of a schema, a regex, one of several choices, or a grammar"
    )
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
        if self.structured is not None:
            self._check_structured()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def with_changes(self, **changes: object) -> Self:
        """A validated copy with some fields changed; fields that were left out remain so."""
        given = {each.name for each in fields(self) if each.init} - self.unset
        return type(self)(**({name: getattr(self, name) for name in given} | changes))

    def without_texts(self) -> Self:
        """A copy without its texts. Not validated again: a large logit_bias makes that slow."""
        bare = copy(self)
        for name in ("stop", "bad_words"):
            object.__setattr__(bare, name, ())
        object.__setattr__(bare, "structured", None)
        return bare

    def _check_flags(self) -> None:
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, f"must be true or false, got {getattr(self, name)!r}")

    def _check_integers(self) -> None:
        for name, is_optional, low, high in _INTEGERS:
            value = getattr(self, name)
            if value is None and is_optional:
                continue
            # Checked inline first: nearly all values pass, and a call costs more than the check.
            if type(value) is not int or value < low or (high is not None and value > high):
                _integer(name, value, low, high)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _bad("min_tokens", f"must not exceed max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if self.truncate_prompt_tokens == 0:
            raise _bad("truncate_prompt_tokens", "must be -1 or at least 1: a prompt has at least one token")

    def _check_numbers(self) -> None:
        for name, below, low, high, not_low in _NUMBERS:
            value = getattr(self, name)
            if type(value) is not float or not below < value <= high:
                _number(name, value, low, high)
                if not_low is not None and value == low:
                    raise _bad(name, f"must be greater than {low:g}; {not_low}")

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
            # Errors name the key, since there may be many.
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise _bad("logit_bias", f"has the key {token!r}, which is not a token id (an integer from 0)")
            if not isinstance(bias, int | float) or isinstance(bias, bool) or not -100.0 <= bias <= 100.0:
                raise _bad("logit_bias", f"must map the key {token} to a number from -100 to 100, got {bias!r}")

    def _check_structured(self) -> None:
        if not isinstance(self.structured, StructuredOutput):
            raise _bad("structured", f"must be a StructuredOutput, got {self.structured!r:.60}")
        for name in ("ignore_eos", "min_tokens"):
            if getattr(self, name):
                raise _bad(name, "cannot be used with a structured output, which decides where the output ends")


class SamplingOptions(TypedDict, total=False):
    """The same settings as keyword arguments of a client, named and typed as in requests. A test compares the two."""

    n: int
    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    top_n_sigma: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    bad_words: str | Sequence[str]
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    prompt_logprobs: int | None
    truncate_prompt_tokens: int | None
    skip_special_tokens: bool
    include_stop_str_in_output: bool


def _above(number: Parameter) -> float:
    low = number.low or 0.0
    return nextafter(low, -inf) if number.not_low is None else low


PARAMETERS: Mapping[str, Parameter] = {
    each.name: each.metadata["parameter"] for each in fields(SamplingParams) if "parameter" in each.metadata
}
NEUTRAL: Mapping[str, float] = {name: each.neutral for name, each in PARAMETERS.items() if each.neutral is not None}
"""Fields for which a model may have its own default, and their values if it has none."""

_KINDS = {each.name: each.type for each in fields(SamplingParams)}
_FLAGS = tuple(name for name, kind in _KINDS.items() if kind is bool)
# Name, whether it may be None, lowest and highest.
_INTEGERS = tuple(
    (name, _KINDS[name] is not int, int(each.low or 0), None if each.high is None else int(each.high))
    for name, each in PARAMETERS.items()
    if _KINDS[name] in (int, int | None)
)
# Name, exclusive lower bound, lowest and highest, and the advice if the lowest itself is out of range.
_NUMBERS = tuple(
    (name, _above(each), each.low or 0.0, each.high or 0.0, each.not_low)
    for name, each in PARAMETERS.items()
    if _KINDS[name] is float
)


def _bad(name: str, what: str) -> BadRequest:
    return BadRequest(f"{name} {what}.", param=name)


def _entries(name: str, value: object) -> tuple[object, ...]:
    # People write None, lists and single strings; a frozen object keeps tuples.
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
    # In Python a bool is an int; here it is a mistake.
    if not isinstance(value, int) or isinstance(value, bool):
        raise _bad(name, f"must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        raise _bad(name, f"must be {'at least ' + str(low) if high is None else f'from {low} to {high}'}, got {value}")


def _number(name: str, value: object, low: float, high: float) -> None:
    # NaN is outside every range, and so is an integer too large for a float.
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise _bad(name, f"must be a number from {low:g} to {high:g}, got {value!r}")
