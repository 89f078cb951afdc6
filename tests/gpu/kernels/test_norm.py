import pytest
import torch

from ostro.kernels.gpu.norm import WIDEST_BLOCK, add_rms_norm, add_rms_norm_plain
from ostro.models.architecture import Norm
from ostro.torch_models.layers import RMSNorm


@pytest.mark.parametrize("with_delta", [True, False])
@pytest.mark.parametrize(
    ("rows", "width"), [(1, 1024), (3, 80), (7, 4096), (2, 5120), (2100, 24), (2, WIDEST_BLOCK + 40)]
)
def test_norm_and_stream_equal_the_plain_twin(device: torch.device, rows: int, width: int, with_delta: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, width, device=device), torch.randn(width, device=device)
    delta = torch.randn(rows, width, device=device) if with_delta else None
    stream, plain_stream = x.clone(), x.clone()
    normed = add_rms_norm(stream, delta, weight, 1e-6)
    torch.testing.assert_close(normed, add_rms_norm_plain(plain_stream, delta, weight, 1e-6), rtol=1e-5, atol=1e-5)
    assert torch.equal(stream, plain_stream)


def test_rows_may_be_strided_and_half_precise(device: torch.device) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 3, 64, device=device, dtype=torch.float16)[:, 1]
    delta = torch.randn(5, 128, device=device, dtype=torch.float16)[:, 64:]
    weight = torch.randn(64, device=device)  # float32, as norms with an offset keep theirs
    plain = x.clone()
    normed = add_rms_norm(x, delta, weight, 1e-5)
    torch.testing.assert_close(normed, add_rms_norm_plain(plain, delta, weight, 1e-5), rtol=2e-3, atol=2e-3)
    assert normed.is_contiguous()
    assert torch.equal(x, plain)


def test_norm_agrees_with_the_model(device: torch.device) -> None:
    torch.manual_seed(0)
    layer = RMSNorm(Norm("norm", 96, 1e-6)).to(device)
    layer.weight.data.normal_()
    x = torch.randn(4, 96, device=device)
    torch.testing.assert_close(add_rms_norm(x, None, layer.weight.data, 1e-6), layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [80, 1024])
def test_an_invariant_norm_has_the_same_bits_among_many_rows(device: torch.device, width: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4100, width, device=device), torch.randn(width, device=device)
    rows = slice(0, 4100) if device.type == "cuda" else slice(0, 60)
    many = add_rms_norm(x[rows].clone(), x[rows], weight, 1e-6, invariant=True)
    for some in (slice(0, 1), slice(7, 40)):
        assert torch.equal(add_rms_norm(x[some].clone(), x[some], weight, 1e-6, invariant=True), many[some])
