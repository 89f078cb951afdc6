import pytest
import torch
from torch import Tensor

from ostro.kernels.gpu.norm import WIDEST_BLOCK, NormWeights, add_norm, add_norm_plain
from ostro.models.architecture import Norm
from ostro.torch_models.layers import LayerNorm, RMSNorm

KINDS = ["rms", "layer", None]


def weights(kind: str | None, width: int, device: torch.device, eps: float = 1e-6) -> NormWeights | None:
    if kind is None:
        return None
    bias = torch.randn(width, device=device) if kind == "layer" else None
    return NormWeights(torch.randn(width, device=device), eps, bias)


def off_centre(rows: int, width: int, device: torch.device) -> Tensor:
    """Rows whose mean a layer norm must subtract."""
    return torch.randn(rows, width, device=device) + 0.5


@pytest.mark.parametrize("with_delta", [True, False])
@pytest.mark.parametrize(
    ("rows", "width"), [(1, 1024), (3, 80), (7, 4096), (2, 5120), (2100, 24), (2, WIDEST_BLOCK + 40)]
)
def test_norm_and_stream_equal_the_plain_twin(device: torch.device, rows: int, width: int, with_delta: bool) -> None:
    torch.manual_seed(0)
    x, norm = torch.randn(rows, width, device=device), weights("rms", width, device)
    delta = torch.randn(rows, width, device=device) if with_delta else None
    stream, plain_stream = x.clone(), x.clone()
    normed = add_norm(stream, delta, norm)
    torch.testing.assert_close(normed, add_norm_plain(plain_stream, delta, norm), rtol=1e-5, atol=1e-5)
    assert torch.equal(stream, plain_stream)


@pytest.mark.parametrize(("rows", "width"), [(3, 80), (2, WIDEST_BLOCK + 40)])
@pytest.mark.parametrize("multiplier", [1.0, 0.22])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("delta_kind", KINDS)
def test_deltas_may_be_normed_and_multiplied_and_norms_centred(
    device: torch.device, rows: int, width: int, kind: str | None, delta_kind: str | None, multiplier: float
) -> None:
    torch.manual_seed(0)
    x, delta = off_centre(rows, width, device), off_centre(rows, width, device)
    norm, delta_norm = weights(kind, width, device), weights(delta_kind, width, device, 1e-3)
    stream, plain_stream = x.clone(), x.clone()
    out = add_norm(stream, delta, norm, delta_norm=delta_norm, multiplier=multiplier)
    plain = add_norm_plain(plain_stream, delta, norm, delta_norm=delta_norm, multiplier=multiplier)
    torch.testing.assert_close(out, plain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(stream, plain_stream, rtol=1e-4, atol=1e-4)
    assert (out is stream) == (norm is None)


def test_nothing_to_add_and_nothing_to_norm_leaves_the_stream_alone(device: torch.device) -> None:
    x = torch.randn(3, 16, device=device)
    assert add_norm(x, None, None) is x


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_rows_may_be_strided_and_half_precise(device: torch.device, kind: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 3, 64, device=device, dtype=torch.float16)[:, 1]
    delta = torch.randn(5, 128, device=device, dtype=torch.float16)[:, 64:]
    norm = weights(kind, 64, device, 1e-5)  # float32, as norms with an offset keep theirs
    plain = x.clone()
    normed = add_norm(x, delta, norm)
    torch.testing.assert_close(normed, add_norm_plain(plain, delta, norm), rtol=2e-3, atol=2e-3)
    assert normed.is_contiguous()
    assert torch.equal(x, plain)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norm_agrees_with_the_model(device: torch.device, kind: str) -> None:
    torch.manual_seed(0)
    layer = (RMSNorm if kind == "rms" else LayerNorm)(Norm("norm", 96, 1e-6)).to(device)
    for parameter in layer.parameters():
        parameter.data.normal_()
    x = off_centre(4, 96, device)
    bias = layer.bias.data if isinstance(layer, LayerNorm) else None
    ours = add_norm(x, None, NormWeights(layer.weight.data, 1e-6, bias))
    torch.testing.assert_close(ours, layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("width", [80, 1024])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_an_invariant_norm_has_the_same_bits_among_many_rows(device: torch.device, width: int, kind: str) -> None:
    torch.manual_seed(0)
    x, norm = torch.randn(4100, width, device=device), weights(kind, width, device)
    rows = slice(0, 4100) if device.type == "cuda" else slice(0, 60)

    def normed(some: slice) -> Tensor:
        return add_norm(x[some].clone(), x[some], norm, delta_norm=norm, invariant=True)

    many = normed(rows)
    for some in (slice(0, 1), slice(7, 40)):
        assert torch.equal(normed(some), many[some])
