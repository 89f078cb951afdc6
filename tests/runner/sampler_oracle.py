"""What the sampler should choose, in plain Python: one row at a time, everything sorted, nothing clever.

Scores are fp32, as the sampler's are; sums and exponentials are float64. `margin` tells how near a decision came to
going the other way, so that a test can pass over the rare example in which the last bit decides.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ostro.engine.request import Request
from ostro.engine.sequence import Sequence
from ostro.runner.random_stream import uniform
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
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    logprobs: int | None = None,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
) -> Sequence:
    params = SamplingParams(
        max_tokens=None,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias or {},
        logprobs=logprobs,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
    )
    request = Request(id=0, prompt_ids=prompt, params=params, seed=seed, eos_ids=eos_ids, bad_word_ids=bad_word_ids)
    seq = Sequence(0, request, choice=choice, max_len=1000)
    seq.token_ids.extend(output)
    return seq


@dataclass(frozen=True)
class Choice:
    token_id: int | None
    """None where nothing can be drawn."""
    margin: float = math.inf


def expected_scores(logits: list[float], seq: Sequence) -> list[np.float32]:
    params = seq.request.params
    scores = [np.float32(logit) for logit in logits]
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
    weights = [math.exp(-float(best - score) / params.temperature) for score in scores]
    margins = [math.inf]

    truncated = 0 < params.top_k < len(scores) or params.top_p < 1
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

    order = kept if truncated else sorted(kept)
    whole = sum(weights[token] for token in order)
    target = uniform(seq.request.seed, seq.choice, seq.num_output)
    held, drawn = 0.0, None
    for token in order:
        held += weights[token] / whole
        margins.append(abs(held - target) if weights[token] else math.inf)
        if drawn is None and held > target:
            drawn = token
    return Choice(drawn, min(margins))
