import pytest
import torch
import torch.nn.functional as F

from ostro.kernels.linear import linear, pack


@pytest.mark.parametrize("rows", [1, 2, 7, 32, 200])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_product_equals_the_plain_twin(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 48), torch.randn(80, 48)
    offset = torch.randn(80) if bias else None
    torch.testing.assert_close(linear(x, weight, offset, pack(weight)), F.linear(x, weight, offset))


def test_half_precision_is_not_packed() -> None:
    assert pack(torch.randn(8, 8, dtype=torch.bfloat16)) is None
