"""The numbers that a hostile request may send, at the ends of their ranges and beside them, over logits that broken
weights may give: the device draws what the plain sampler draws, or fails where that fails.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor
from triton_device import slow_in_the_interpreter

from ostro.backends.sampling.sampler import sample
from ostro.engine.request import Request
from ostro.engine.sequence import Sequence
from ostro.kernels.gpu.sampling import SamplerTables, SlotSettings, sample_tokens
from ostro.sampling_params import SamplingParams

VOCAB = 300
BELOW_ONE = math.nextafter(1.0, 0.0)
LEAST = 5e-324
HUGE = 3e38
TEMPERATURES = (0.0, 1e-300, 1e-45, 1e-38, 1e-7, math.nextafter(2.0, 0.0), 2.0)
# With every cut.
CUT_TEMPERATURES = (LEAST, 1e-40, 1.0)
CUTS: tuple[Mapping[str, float], ...] = (
    {},
    {"top_p": LEAST},
    {"top_p": 1e-45},
    {"top_p": BELOW_ONE},
    {"top_p": 1 - 2**-25},
    {"min_p": LEAST},
    {"min_p": 1e-45},
    {"min_p": BELOW_ONE},
    {"min_p": 1.0},
    {"top_k": 1},
    {"top_k": VOCAB - 1},
    {"top_k": VOCAB},
    {"top_k": VOCAB + 1},
    {"top_k": 2**31},
    {"top_k": 2**63},
    {"top_k": VOCAB - 1, "top_p": BELOW_ONE, "min_p": LEAST},
)
PENALTIES: tuple[Mapping[str, float], ...] = (
    {"repetition_penalty": 0.01},
    {"repetition_penalty": 10.0},
    {"presence_penalty": -2.0, "frequency_penalty": -2.0},
    {"repetition_penalty": 10.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
    {"frequency_penalty": LEAST},
)
SEEDS = (-(2**63), 2**63 - 1, 0, -1)


def logits_of(kind: str) -> Tensor:
    noise = torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 3
    return {
        "ordinary": noise,
        "equal": torch.zeros(VOCAB),
        "biased up": noise + 100,
        "biased down": noise - 100,
        "one biased": noise + 200 * (torch.arange(VOCAB) == 7) - 100,
        "subnormal": noise * 1e-40,
        "huge": noise.sign() * HUGE,
        "nearly huge": noise * 1e37,
        "banned but one": torch.where(torch.arange(VOCAB) == 133, noise, -math.inf),
    }[kind]


KINDS = ("ordinary", "one biased", "subnormal", "huge")
# Each takes the interpreter half a minute.
MORE_KINDS = ("equal", "biased up", "biased down", "nearly huge", "banned but one")


def sequence_of(entry: SlotSettings) -> Sequence:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    params = SamplingParams(max_tokens=None, **{name: getattr(entry, name) for name in names})
    request = Request(id=0, prompt_ids=tuple(entry.prompt_ids) or (0,), params=params, seed=entry.seed)
    seq = Sequence(0, request, choice=entry.choice, max_len=1000)
    seq.token_ids.extend(entry.output_ids)
    return seq


def assert_alike(logits: Tensor, entries: list[SlotSettings], device: torch.device) -> None:
    tables = SamplerTables(len(entries), VOCAB, device)
    tables.admit(entries)
    tokens = torch.zeros(len(entries), dtype=torch.int64, device=device)
    errors = torch.zeros(len(entries), dtype=torch.int8, device=device)
    slots = torch.arange(len(entries), dtype=torch.int32, device=device)
    with np.errstate(all="ignore"):
        sample_tokens(logits.to(device), slots, tables, tokens, errors, truncated=True, penalties=True)
    for entry, token, error, plain in zip(
        entries,
        tokens.tolist(),
        errors.tolist(),
        sample(logits, [sequence_of(entry) for entry in entries]),
        strict=True,
    ):
        assert (error != 0) == (plain.error is not None), (entry, error, plain)
        assert token == max(plain.token_id, 0), (entry, plain)


@pytest.mark.full
@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=slow_in_the_interpreter) for kind in MORE_KINDS)])
def test_extreme_settings_draw_what_the_plain_sampler_draws(kind: str, device: torch.device) -> None:
    settings = [{"temperature": temperature, **cut} for temperature, cut in product(CUT_TEMPERATURES, CUTS)]
    settings += [{"temperature": temperature, **cut} for temperature, cut in product(TEMPERATURES, CUTS[:2])]
    settings += [{"temperature": heat, **each} for heat, each in product((0.0, LEAST, 2.0), PENALTIES)]
    seen = {"prompt_ids": (1, 2, 7), "output_ids": (7, 7, 9)}
    entries = [
        replace(SlotSettings(slot=slot, seed=SEEDS[slot % len(SEEDS)], choice=slot % 128), **each, **seen)  # type: ignore[arg-type]
        for slot, each in enumerate(settings)
    ]
    assert_alike(logits_of(kind).repeat(len(entries), 1), entries, device)
