"""The sampler's expected choices, in plain Python: one row at a time, everything sorted, nothing clever.

Scores are fp32, as the sampler's are; sums and exponentials are float64. `margin` tells how near a decision came to
going the other way, so that a test can pass over the rare example in which the last bit decides.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from statistics import pstdev
from typing import Any

import numpy as np

from ostro.backends.sampling.random_stream import stream_key
from ostro.engine.request import Request
from ostro.engine.sequence import Sequence
from ostro.sampling_params import SamplingParams


def make_seq(
    *,
    prompt: tuple[int, ...] = (0,),
    output: tuple[int, ...] = (),
    seed: int = 0,
    choice: int = 0,
    eos_ids: frozenset[int] = frozenset(),
    bad_word_ids: tuple[tuple[int, ...], ...] = (),
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    top_n_sigma: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    logprobs: int | None = None,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    allowed: Collection[int] | None = None,
) -> Sequence:
    """`allowed` are the only tokens that its mask leaves."""
    params = _checked(
        frozenset((logit_bias or {}).items()),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        top_n_sigma=top_n_sigma,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logprobs=logprobs,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
    )
    request = Request(id=0, prompt_ids=prompt, params=params, seed=seed, eos_ids=eos_ids, bad_word_ids=bad_word_ids)
    seq = Sequence(0, request, choice=choice, max_len=1000)
    seq.token_ids.extend(output)
    if allowed is not None:
        seq.mask = mask_of(allowed)
    return seq


@lru_cache
def _checked(logit_bias: frozenset[tuple[int, float]], **settings: Any) -> SamplingParams:
    """Checking takes most of the time that a sequence takes to make, and thousands differ in the seed alone."""
    return SamplingParams(max_tokens=None, logit_bias=dict(logit_bias), **settings)


def mask_of(allowed: Collection[int], most: int = 4096) -> memoryview:
    """The words that allow these tokens, for any vocabulary up to `most`."""
    words = bytearray(most // 8)
    for token in allowed:
        words[token >> 3] |= 1 << (token & 7)
    return memoryview(words)


@dataclass(frozen=True)
class Choice:
    token_id: int | None
    """None where nothing can be drawn."""
    margin: float = math.inf


def expected_scores(logits: list[float], seq: Sequence) -> list[np.float32]:
    params = seq.request.params
    scores = [np.float32(logit) for logit in logits]
    if seq.mask is not None:
        scores = [
            score if seq.mask[token >> 3] >> (token & 7) & 1 else np.float32(-math.inf)
            for token, score in enumerate(scores)
        ]
    for token, bias in params.logit_bias.items():
        if token < len(scores):
            scores[token] += np.float32(bias)
    penalty = np.float32(params.repetition_penalty)
    for token in set(seq.token_ids):
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token, count in Counter(seq.output_ids).items():
        scores[token] -= np.float32(params.presence_penalty + params.frequency_penalty * count)
    for word in seq.request.bad_word_ids:
        before = list(word[:-1])
        if word[-1] < len(scores) and seq.token_ids[len(seq.token_ids) - len(before) :] == before:
            scores[word[-1]] = np.float32(-math.inf)
    if seq.num_output < params.min_tokens:
        for token in seq.stop_ids:
            if token < len(scores):
                scores[token] = np.float32(-math.inf)
    return scores


def expected_choice(logits: list[float], seq: Sequence) -> Choice:
    params = seq.request.params
    scores = expected_scores(logits, seq)
    best = max(scores)
    if not math.isfinite(best):
        return Choice(None)
    ranking = sorted(range(len(scores)), key=lambda token: (best - scores[token], token))
    if params.temperature == 0:
        return Choice(ranking[0])
    margins = [math.inf]
    if params.top_n_sigma:
        limit = float(best) - params.top_n_sigma * pstdev(float(score) for score in scores if math.isfinite(score))
        margins += [abs(float(score) - limit) for score in scores]
        scores = [score if score >= limit else np.float32(-math.inf) for score in scores]
    weights = [math.exp(-float(best - score) / params.temperature) for score in scores]

    kept = ranking[: params.top_k] if params.top_k else ranking
    if params.top_p < 1:
        whole = sum(weights[token] for token in kept)
        held, length = 0.0, 0
        while length < len(kept) and held < params.top_p * whole:
            held += weights[kept[length]]
            length += 1
            margins.append(abs(held / whole - params.top_p))
        kept = kept[:length]
    if params.min_p:
        margins += [abs(weights[token] - params.min_p) for token in kept]
        kept = [token for token in kept if weights[token] >= params.min_p]

    drawn, margin = race({token: weights[token] for token in kept}, seq)
    return Choice(drawn, min(*margins, margin))


def race(weights: Mapping[int, float], seq: Sequence) -> tuple[int, float]:
    """The drawn token: of the block of 128 ids that arrives first, the token that does."""
    blocks: dict[int, float] = {}
    for token, weight in weights.items():
        blocks[token // 128] = blocks.get(token // 128, 0.0) + weight
    block, block_margin = first_to_arrive(blocks, {block: 128 + block for block in blocks}, seq)
    within = {token: weight for token, weight in weights.items() if token // 128 == block}
    token, token_margin = first_to_arrive(within, {token: token % 128 for token in within}, seq)
    return token, min(block_margin, token_margin)


def first_to_arrive(weights: Mapping[int, float], indices: Mapping[int, int], seq: Sequence) -> tuple[int, float]:
    """The entry for which noise / weight is least, and by which share the next one is later."""
    times = {entry: exponential(seq, indices[entry]) / weight for entry, weight in weights.items() if weight}
    first, *others = sorted(times, key=lambda entry: times[entry])
    return first, times[others[0]] / times[first] - 1 if others else math.inf


def exponential(seq: Sequence, index: int) -> float:
    return -math.log1p(-uniform(stream_key(seq.request.seed, seq.choice, seq.num_output), index))


def uniform(key: int, index: int) -> float:
    """Number `index` of the SplitMix64 stream that begins at `key`: its upper 52 bits, strictly between 0 and 1."""
    word = (key + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    word ^= word >> 31
    return ((word >> 12) + 0.5) / 2**52
