import pytest
import torch
import torch.nn.functional as F

from ostro.kernels.norm import rms_norm


@pytest.mark.parametrize("shape", [(1, 576), (7, 64), (3, 5, 8)])
def test_norm_equals_the_plain_twin(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), F.rms_norm(x, shape[-1:], weight, 1e-5))


def test_each_head_may_have_its_own_weight() -> None:
    x, weight = torch.randn(3, 5, 8), torch.randn(5, 8)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), F.rms_norm(x, (8,), None, 1e-5) * weight)


def test_zeros_stay_zeros() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5), torch.zeros(2, 8))
