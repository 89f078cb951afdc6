"""How far two answers agree: in text, in tokens, in probabilities. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ostro.measure.compare.answers import Answer, Outcome, Token


@dataclass(frozen=True, slots=True)
class Divergence:
    """Absolute differences between the two sides' log-probabilities, over the tokens of their common prefix."""

    mean: float
    max: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement of two answers to one prompt."""

    exact: bool
    prefix_chars: int
    """Length of the common prefix in characters."""
    prefix_tokens: int | None
    """The same in tokens; None if a side reports none."""
    divergence: Divergence | None
    """None if a side reports no log-probabilities, or there is no common token."""


def agreement(a: Outcome, b: Outcome) -> Agreement | None:
    """None if a side has failed: there is nothing to compare."""
    if not (isinstance(a, Answer) and isinstance(b, Answer)):
        return None
    prefix_tokens = _common_tokens(a.tokens, b.tokens)
    return Agreement(
        exact=a.text == b.text,
        prefix_chars=common_prefix(a.text, b.text),
        prefix_tokens=prefix_tokens,
        divergence=_divergence(a.tokens[: prefix_tokens or 0], b.tokens[: prefix_tokens or 0]),
    )


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the common prefix."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Agreement over all prompts. A prompt that failed on either side counts as a difference."""

    prompts: int
    compared: int
    """Prompts that both sides answered."""
    exact: int
    prefix_chars: float | None
    """Mean length of the common prefix, over the compared prompts."""
    prefix_share: float | None
    """Mean length of the common prefix, as a share of the longer text."""
    prefix_tokens: float | None
    """Mean common prefix in tokens, over the prompts for which both sides report tokens."""
    divergence: Divergence | None
    """Divergence over the tokens of all common prefixes."""

    @property
    def exact_share(self) -> float:
        return self.exact / self.prompts


def summary(outcomes: Sequence[tuple[Outcome, Outcome]]) -> Summary:
    pairs = [(a, b, found) for a, b in outcomes if (found := agreement(a, b)) is not None]
    tokens = [found.prefix_tokens for _, _, found in pairs if found.prefix_tokens is not None]
    return Summary(
        prompts=len(outcomes),
        compared=len(pairs),
        exact=sum(found.exact for _, _, found in pairs),
        prefix_chars=fmean(found.prefix_chars for _, _, found in pairs) if pairs else None,
        prefix_share=fmean(_share(a, b, found.prefix_chars) for a, b, found in pairs) if pairs else None,
        prefix_tokens=fmean(tokens) if tokens else None,
        divergence=_overall([found.divergence for _, _, found in pairs if found.divergence is not None]),
    )


def _share(a: Outcome, b: Outcome, prefix: int) -> float:
    assert isinstance(a, Answer)
    assert isinstance(b, Answer)
    longer = max(len(a.text), len(b.text))
    return prefix / longer if longer else 1.0


def _common_tokens(a: Sequence[Token], b: Sequence[Token]) -> int | None:
    if not a or not b:
        return None
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (x, y) in pairs if not _same(x, y)), min(len(a), len(b)))


def _same(a: Token, b: Token) -> bool:
    if a.id is not None and b.id is not None:
        return a.id == b.id
    # One side may only show placeholders for parts of a character, which could match the other's: the texts decide.
    parts = (_stands_in(a) and _is_part(b)) or (_stands_in(b) and _is_part(a))
    return a.text == b.text or parts


def _stands_in(token: Token) -> bool:
    return not token.text or "\ufffd" in token.text


def _is_part(token: Token) -> bool:
    return _stands_in(token) or token.text.startswith("bytes:")


def _divergence(a: Sequence[Token], b: Sequence[Token]) -> Divergence | None:
    differences = [
        abs(x.logprob - y.logprob) for x, y in zip(a, b, strict=True) if x.logprob is not None and y.logprob is not None
    ]
    return Divergence(fmean(differences), max(differences), len(differences)) if differences else None


def _overall(each: Sequence[Divergence]) -> Divergence | None:
    num_tokens = sum(one.num_tokens for one in each)
    if not num_tokens:
        return None
    mean = sum(one.mean * one.num_tokens for one in each) / num_tokens
    return Divergence(mean, max(one.max for one in each), num_tokens)
