import pytest
import torch

from ostro.kernels.gpu.logits import finished_logits, finished_logits_plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("multiplier", [1.0, 0.125])
def test_logits_equal_the_plain_twins(
    device: torch.device, multiplier: float, softcap: float | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(3, 1001, device=device) * 40).to(dtype)
    plain = finished_logits_plain(logits, multiplier=multiplier, softcap=softcap)
    ours = finished_logits(logits.clone(), multiplier=multiplier, softcap=softcap)
    assert ours.dtype == plain.dtype
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def test_huge_logits_reach_the_cap_and_nan_stays(device: torch.device) -> None:
    logits = torch.tensor([[1e9, -1e9, 0.0, float("inf"), float("-inf"), float("nan")]], device=device)
    found = finished_logits(logits, softcap=30.0)
    expected = torch.tensor([[30.0, -30.0, 0.0, 30.0, -30.0, float("nan")]], device=device)
    torch.testing.assert_close(found, expected, equal_nan=True)
