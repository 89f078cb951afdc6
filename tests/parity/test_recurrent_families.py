"""Models whose layers keep a state, against transformers, for prompts around the blocks that it computes them in."""

import pytest
import torch
from dense_context import DenseContext, dense_logits
from every_family import RECURRENT
from test_families import CONFIGS, our_model, random_ids, reference_of

NAMES = [name for name in CONFIGS if name.split("-")[0] in RECURRENT]


def full_but(*kept: object) -> list[object]:
    """For `parametrize`: every family and length, of which few are for `make test`."""
    lengths = (1, 3, 63, 64, 65, 150)
    return [
        pytest.param(name, length, marks=() if name in kept and length in (3, 65) else pytest.mark.full)
        for name in NAMES
        for length in lengths
    ]


@pytest.mark.parametrize(("name", "length"), full_but("qwen3_5", "lfm2", "granitemoehybrid", "falcon_h1", "nemotron_h"))
def test_logits_equal_those_of_transformers_for_a_prompt_of_any_length(name: str, length: int) -> None:
    """Within 1e-5 of the largest, beyond what its own two ways differ by: in blocks, and token by token."""
    reference, ids = reference_of(name), random_ids(length)
    expected, cache, rows = reference.logits(ids), None, []
    with torch.inference_mode():
        for token in ids:
            step = reference.model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            rows.append(step.logits[0])
    apart = (torch.cat(rows) - expected).abs().max().item()
    ours = dense_logits(our_model(CONFIGS[name], reference), ids)
    allowed = 1e-5 * expected.abs().max().item() + apart
    torch.testing.assert_close(ours, expected, atol=allowed, rtol=0)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "qwen3_5" else pytest.mark.full) for name in NAMES]
)
def test_greedy_tokens_equal_those_of_transformers(name: str) -> None:
    reference, ids = reference_of(name), random_ids(10)
    with torch.inference_mode():
        whole = reference.model.generate(
            torch.tensor([ids]), max_new_tokens=64, min_new_tokens=64, do_sample=False, eos_token_id=None
        )
    model, ctx, ours = our_model(CONFIGS[name], reference), DenseContext(), list(ids)
    with torch.inference_mode():
        read = torch.tensor(ids)
        for _ in range(64):
            positions = torch.arange(len(ours) - len(read), len(ours))
            ours.append(int(model.logits(model(read, positions, ctx)[-1:]).argmax()))
            read = torch.tensor(ours[-1:])
    assert ours == whole[0].tolist()
