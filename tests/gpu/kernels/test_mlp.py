import pytest
import torch
from described_parts import described_mlp

from ostro.kernels.gpu.mlp import PLAIN, activated, activated_plain
from ostro.torch_models.layers import GatedMLP


@pytest.mark.parametrize("activation", sorted(PLAIN))
@pytest.mark.parametrize(("tokens", "inner"), [(1, 3072), (5, 1000), (3, 24)])
@pytest.mark.parametrize("gated", [True, False])
def test_activations_equal_the_plain_twin(
    device: torch.device, activation: str, tokens: int, inner: int, gated: bool
) -> None:
    torch.manual_seed(0)
    y = torch.randn(tokens, (2 if gated else 1) * inner, device=device) * 2
    ours, plain = activated(y, activation, gated=gated), activated_plain(y, activation, gated=gated)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


def test_half_precision_is_rounded_once(device: torch.device) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(9, 256, device=device, dtype=torch.float16)
    ours, plain = activated(gate_up, "silu", gated=True), activated_plain(gate_up, "silu", gated=True)
    torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-4)


def test_gate_comes_first_as_in_the_model(device: torch.device) -> None:
    torch.manual_seed(0)
    mlp = GatedMLP(described_mlp(16, 48)).to(device)
    for weight in mlp.parameters():
        weight.data.normal_()
    x = torch.randn(3, 16, device=device)
    inner = activated(mlp.gate_up_proj(x), "silu", gated=True)
    torch.testing.assert_close(mlp.down_proj(inner), mlp(x), rtol=1e-4, atol=1e-4)
