"""Turns a drawn token and its row's best score into a result. Imports no torch."""

import math

from ostro.engine.runner import NOT_FINITE, SampledToken, TokenLogprob
from ostro.errors import NothingAllowed

ALL_BANNED = (
    f"{NothingAllowed.opening}. Loosen logit_bias, bad_words, stop_token_ids or min_tokens; a structured output may "
    "allow none of the tokens that they leave."
)


def outcome(token_id: int, best: float, logprob: TokenLogprob | None) -> SampledToken:
    """The best score reveals whether the row could be sampled: NaN and infinity both show up in it."""
    if best == -math.inf:
        return SampledToken(-1, error=ALL_BANNED)
    if not math.isfinite(best):
        return SampledToken(-1, error=NOT_FINITE)
    return SampledToken(token_id, logprob)
