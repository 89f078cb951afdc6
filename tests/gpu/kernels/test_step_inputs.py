import pytest
import torch

from ostro.kernels.gpu.step_inputs import FIELDS, unpack, unpack_plain


@pytest.mark.parametrize("count", [1, 7, 300])
def test_inputs_are_unpacked_as_the_plain_twin_does(device: torch.device, count: int) -> None:
    torch.manual_seed(0)
    sampled = torch.randint(0, 1000, (64,), dtype=torch.int32, device=device)
    wide = torch.randint(0, 500, (FIELDS, count + 3), dtype=torch.int32, device=device)
    sent = wide[:, :count]
    # Some tokens wait for the step before, and some rows are padding.
    sent[0, ::2] = -1 - torch.randint(0, 64, (len(sent[0, ::2]),), dtype=torch.int32, device=device)
    sent[3, ::3] = -1
    for given, expected in zip(unpack(sent, sampled), unpack_plain(sent, sampled), strict=True):
        assert given.dtype == torch.int64
        assert torch.equal(given, expected)
    assert unpack(sent, sampled).tokens.min() >= 0
