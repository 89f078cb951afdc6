"""Mixtures of experts: who is chosen, what others in a batch change, and configs that lie."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from every_family import CASES, MIXTURES, TINY
from hypothesis import given, settings
from hypothesis import strategies as st
from native_models import ModelCheckpoint, savable_model
from tiny_models import random_model

from ostro.backends.loading import load_runner
from ostro.backends.planning import plan
from ostro.config import EngineConfig
from ostro.errors import BadCheckpoint, Unsupported, UnsupportedModel
from ostro.models import architecture as arch
from ostro.models.adapter_places import described_terms
from ostro.models.registry import describe
from ostro.torch_models.decoder import Decoder
from ostro.torch_models.experts import ExpertMatrices, Experts, route, route_by_sigmoids
from ostro.torch_models.loading import load_weights
from ostro.torch_models.lora import Adapters
from ostro.weights.adapter import LowRank

HIDDEN, INNER, COUNT = 16, 24, 6


def described(chosen: int, *, normalized: bool = True) -> arch.Experts:
    gate_up = arch.Part("gate.{}", INNER), arch.Part("up.{}", INNER)
    return arch.Experts(
        router=arch.Projection(HIDDEN, (arch.Part("router", COUNT),)),
        up=arch.ExpertMatrices(COUNT, HIDDEN, gate_up),
        down=arch.ExpertMatrices(COUNT, INNER, (arch.Part("down.{}", HIDDEN),)),
        activation="silu",
        chosen=chosen,
        normalized=normalized,
    )


def module(chosen: int, *, normalized: bool = True) -> Experts:
    made = Experts(described(chosen, normalized=normalized))
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.data.normal_(0.0, 0.4, generator=generator)
    return made


def plain(experts: Experts, row: torch.Tensor) -> torch.Tensor:
    """One token, expert by expert, as the definition says it."""
    logits = (experts.router.weight @ row).tolist()
    chosen = sorted(range(COUNT), key=lambda expert: (-logits[expert], expert))[: experts.chosen]
    among = chosen if experts.normalized else range(COUNT)
    total = sum(torch.tensor(logits[expert]).exp() for expert in among)
    out = torch.zeros(HIDDEN)
    for expert in chosen:
        gate, up = (experts.up.weight[expert] @ row).chunk(2)
        weight = torch.tensor(logits[expert]).exp() / total
        out += weight * (experts.down.weight[expert] @ (torch.nn.functional.silu(gate) * up))
    return out


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("chosen", [1, 2, COUNT])
def test_a_token_goes_through_its_experts_alone(chosen: int, normalized: bool) -> None:
    experts = module(chosen, normalized=normalized)
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(experts(x), torch.stack([plain(experts, row) for row in x]), atol=1e-5, rtol=1e-5)


# Few values, so that many logits are equal.
LOGITS = st.lists(st.sampled_from([-1.0, -0.0, 0.0, 0.5, 2.0, 1e30]), min_size=COUNT, max_size=COUNT)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rows=st.lists(LOGITS, min_size=1, max_size=5), chosen=st.integers(1, COUNT), normalized=st.booleans())
def test_first_experts_win_among_equal_logits(rows: list[list[float]], chosen: int, normalized: bool) -> None:
    experts, weights = route(torch.tensor(rows), chosen, normalized=normalized)
    expected = [sorted(range(COUNT), key=lambda expert: (-row[expert], expert))[:chosen] for row in rows]
    assert experts.tolist() == expected
    assert bool(weights.isfinite().all())
    sums = weights.sum(-1)
    assert bool(((sums - 1).abs() < 1e-6).all() if normalized else (sums < 1 + 1e-6).all())


@settings(max_examples=30, deadline=None, derandomize=True)
@given(cuts=st.sets(st.integers(1, 11)), seed=st.integers(0, 99))
def test_a_tokens_output_does_not_depend_on_how_a_batch_is_cut(cuts: set[int], seed: int) -> None:
    experts = module(2)
    x = torch.randn(12, HIDDEN, generator=torch.Generator().manual_seed(seed))
    whole = experts(x)
    ends = [*sorted(cuts), 12]
    parts = [experts(x[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("normalized", [True, False])
def test_a_choice_by_sigmoids_is_biased_and_its_weights_are_not(normalized: bool) -> None:
    logits, bias = torch.tensor([[0.0, 2.0, 0.0, -1.0], [3.0, 3.0, 3.0, 3.0]]), torch.tensor([0.0, -0.5, 0.0, 0.5])
    routing = arch.SigmoidRouting(choice_bias="bias", eps=0.1, scale=2.5)
    experts, weights = route_by_sigmoids(logits, 3, routing, bias, normalized=normalized)
    assert experts.tolist() == [[3, 0, 2], [3, 0, 2]]
    expected = logits.gather(1, experts).sigmoid()
    if normalized:
        expected = expected / (expected.sum(1, keepdim=True) + 0.1)
    torch.testing.assert_close(weights, 2.5 * expected)


@pytest.mark.parametrize("exact", [True, False])
def test_a_router_may_be_exact_in_a_model_of_fewer_bits(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded logits rank experts otherwise that are nearly as good."""
    routing = arch.SigmoidRouting(choice_bias=None, eps=1e-20, exact=exact)
    experts = Experts(replace(described(2), sigmoid=routing)).to(torch.bfloat16)
    generator, read = torch.Generator().manual_seed(0), list[torch.Tensor]()
    for parameter in experts.parameters():
        parameter.data.normal_(0.0, 0.4, generator=generator)
    x = torch.randn(50, HIDDEN, generator=generator).to(torch.bfloat16)

    def recorded(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        read.append(logits)
        return x

    monkeypatch.setattr(experts, "mixed", recorded)
    experts(x)
    assert torch.equal(read[0], x.float() @ experts.router.weight.float().T) == exact


def test_many_tokens_are_computed_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = module(2)
    x = torch.randn(12, HIDDEN, generator=torch.Generator().manual_seed(3))
    whole = experts(x)
    rows: list[int] = []

    def recorded(part: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        rows.append(len(part))
        return ExpertMatrices.forward(experts.up, part, *rest)

    monkeypatch.setattr("ostro.torch_models.experts.MOST_SLOTS", 10)
    monkeypatch.setattr(experts.up, "forward", recorded)
    torch.testing.assert_close(experts(x), whole, atol=1e-6, rtol=1e-5)
    assert rows == [10, 10, 4]


def test_non_finite_logits_are_passed_on() -> None:
    x = torch.full((2, HIDDEN), torch.nan)
    assert bool(module(2)(x).isnan().all())


FULL = ["full_attention"] * 1000


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_experts": 0, "num_local_experts": None}, "num_experts"),
        ({"num_experts": 10**6, "num_local_experts": None}, "num_experts"),
        ({"num_local_experts": 5000}, "num_local_experts"),
        ({"num_local_experts": 4096, "num_hidden_layers": 1000, "layer_types": FULL}, "num_local_experts"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok"),
    ],
    ids=str,
)
def test_impossible_sizes_are_refused_by_name(family: str, changes: Mapping[str, object], field: str) -> None:
    case = CASES[family]
    with pytest.raises(BadCheckpoint, match=f"'{case.spelling.get(field, field)}'"):
        describe({**TINY[family], **case.spelled(changes)})


@pytest.mark.parametrize("layers", [[-1], [True], ["0"], 3])
def test_layers_without_experts_must_be_numbers(layers: object) -> None:
    with pytest.raises(BadCheckpoint, match="'mlp_only_layers'"):
        describe({**TINY["qwen3_moe"], "mlp_only_layers": layers})


def test_clipped_queries_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="'clip_qkv'"):
        describe({**TINY["olmoe"], "clip_qkv": 8.0})


def test_experts_beside_an_mlp_are_idle_but_for_those_of_a_token() -> None:
    sizes = {"num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 8}
    config = {**TINY["gemma4"], "enable_moe_block": True, **sizes}
    mixture, dense = describe(config), describe({**config, "enable_moe_block": False})
    assert isinstance(mixture, arch.Architecture)
    assert isinstance(dense, arch.Architecture)
    assert (mixture.idle_weights, dense.idle_weights) == (4 * (5 - 2) * 3 * 8 * 16, 0)


@pytest.mark.parametrize("family", MIXTURES)
def test_tensors_of_experts_are_checked_by_name(family: str) -> None:
    model = savable_model(TINY[family])
    tensors = dict(ModelCheckpoint(model, TINY[family]).tensors())
    name = next(name for name in tensors if "expert" in name or "input_linear" in name)
    with pytest.raises(BadCheckpoint, match=name):
        load_weights(model, {**tensors, name: tensors[name][..., :-1]}.items())
    with pytest.raises(BadCheckpoint, match=name):
        load_weights(model, {key: tensor for key, tensor in tensors.items() if key != name}.items())


def term(rows: int, columns: int) -> LowRank:
    a, b = (torch.randn(shape, generator=torch.Generator().manual_seed(2)) for shape in ((2, columns), (rows, 2)))
    return LowRank(a.numpy(), b.numpy(), 1.0)


def test_adapters_may_change_attention_and_not_experts() -> None:
    model = random_model(TINY["qwen3_moe"])
    assert isinstance(model, Decoder)
    Adapters(model, {"a": {"model.layers.0.self_attn.o_proj": term(16, 16)}})
    for name, rows in (("mlp.gate", 4), ("mlp.experts.1.up_proj", 8)):
        with pytest.raises(UnsupportedModel, match=rf"'a' changes 'layers\.1\.{name}', which belongs to a mixture"):
            Adapters(model, {"a": {f"layers.1.{name}": term(rows, 16)}})
        with pytest.raises(UnsupportedModel, match=rf"'a' changes 'layers\.1\.{name}', which belongs to a mixture"):
            described_terms(model.described, {"a": {f"layers.1.{name}": term(rows, 16)}})


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_on_torch_they_are_not_quantized(quantize: str, tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(random_model(TINY["olmoe"]), TINY["olmoe"])
    engine = EngineConfig(device="cpu", backend="torch", quantize=quantize)  # type: ignore[arg-type]
    for ask in (plan, load_runner):
        with pytest.raises(Unsupported, match=f"quantize {quantize} of a mixture of experts"):
            ask(checkpoint, engine)
