import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_oracle import mask_of
from test_sampling import admitted, entries_of, random_logits, sequence_of, step

from ostro.backends.sampling.sampler import sample
from ostro.kernels.gpu.token_masks import ban_plain, ban_tokens


def random_words(masks: int, vocab: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (masks, -(-vocab // 32)), generator=generator).to(torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 31, 32, 100, 1024, 2500])
def test_bans_are_those_of_the_plain_twin(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    logits = random_logits(4, vocab, vocab).to(dtype)
    words, rows = random_words(3, vocab, vocab), torch.tensor([2, -1, 0, 1], dtype=torch.int32)
    expected, found = logits.clone(), logits.clone().to(device)
    ban_plain(expected, words, rows)
    with np.errstate(all="ignore"):
        ban_tokens(found, words.to(device), rows.to(device))
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(found[1].cpu(), logits[1])
    assert vocab == 1 or (expected[0] == -math.inf).any()


def test_a_banned_logit_that_is_not_finite_still_shows(device: torch.device) -> None:
    logits = torch.tensor([[1.0, math.nan, math.inf, -math.inf]], device=device)
    with np.errstate(all="ignore"):
        ban_tokens(logits, torch.tensor([[1]], dtype=torch.int32, device=device), torch.tensor([0], device=device))
    found = logits[0].tolist()
    assert found[0] == 1.0
    assert math.isnan(found[1])
    assert math.isnan(found[2])
    assert found[3] == -math.inf


@pytest.mark.full
@given(data=st.data(), vocab=st.sampled_from([2, 7, 129, 200]), seed=st.integers(0, 2**32), tied=st.booleans())
@settings(max_examples=12, deadline=None)
def test_masked_draws_are_those_of_the_plain_sampler(data: st.DataObject, vocab: int, seed: int, tied: bool) -> None:
    """The plain sampler's masked draws are held to a reference, and to the native core's, by their own tests."""
    entries = [data.draw(entries_of(vocab, slot)) for slot in range(2)]
    logits = random_logits(2, vocab, seed, tied=tied)
    allowed = data.draw(st.sets(st.integers(0, vocab - 1), min_size=1))
    mask = mask_of(allowed)
    seqs = [sequence_of(entry) for entry in entries]
    seqs[1].mask = mask
    expected = [sampled.token_id for sampled in sample(logits, seqs)]

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found, words = logits.clone().to(device), torch.from_numpy(np.frombuffer(mask, np.int32).copy())
    with np.errstate(all="ignore"):
        ban_tokens(found, words[None].to(device), torch.tensor([-1, 0], dtype=torch.int32, device=device))
    tables = admitted(entries, vocab, device)
    tokens, errors = step(
        found,
        [entry.slot for entry in entries],
        tables,
        truncated=any(entry.truncates for entry in entries),
        penalties=any(entry.penalises for entry in entries),
    )
    assert (tokens, errors) == (expected, [0, 0])
    assert tokens[1] in allowed
