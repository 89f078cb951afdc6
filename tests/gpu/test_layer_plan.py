"""Every family's layers on fused kernels against their plain twin, the model's own `forward` on a CPU, in fp32."""

from collections.abc import Callable, Sequence
from pathlib import Path

import family_case
import numpy as np
import pytest
import torch
from dense_context import dense_logits
from every_family import RUN_BY_ALL, TINY, configs_of, some
from family_case import Config
from tiny_models import random_model
from torch import Tensor
from triton_device import slow_in_the_interpreter

from ostro.backends.cuda.choices import Choices, described_matmuls, kept
from ostro.backends.cuda.layer_plan import LayerPlan, MlpPlan, kinds, layer_plans, why_unfused
from ostro.backends.cuda.measuring import this_gpu
from ostro.backends.cuda.part import GpuPart
from ostro.backends.cuda.projections import matmul_of
from ostro.backends.cuda.step_plan import Mixed
from ostro.engine.batch import Chunk
from ostro.engine.request import Request
from ostro.engine.sequence import Sequence as EngineSequence
from ostro.kernels.gpu.step_inputs import FIELDS, LENGTH, POSITION, SLOT, TOKEN
from ostro.kernels.gpu.tilings import Matmul, SliceTiling, Tiling, default_tiling
from ostro.sampling_params import SamplingParams
from ostro.torch_models.base import Model
from ostro.torch_models.decoder import Decoder
from ostro.torch_models.layers import LayerNorm
from ostro.torch_models.lora import Adapters

PAGE, VOCAB = 16, 32
SIZES: Config = {
    **family_case.SIZES,
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def narrowed(config: Config) -> Config:
    """The config with windows shorter than the sequences below."""
    return {**config, "sliding_window": 4} if config.get("sliding_window") else config


VARIANTS = {name: narrowed(config) for name, config in configs_of(RUN_BY_ALL, SIZES).items()}
# Longer than the windows. What comes of a prompt at once, then one token of each sequence, then one of the first alone.
LENGTHS, PROMPTS = (7, 4), (5, 3)


def decoder(name: str, **changes: object) -> Decoder:
    model = random_model({**VARIANTS[name], **changes})
    assert isinstance(model, Decoder)
    return model


Own = Callable[[Decoder], Choices]


def everything(model: Decoder) -> Choices:
    """Our own matmuls for up to 16 rows."""
    return own_matmuls(model, lambda which: True)


def nothing(model: Decoder) -> Choices:
    """The library's matmuls for more than one row."""
    return Choices()


def first_and_last(model: Decoder) -> Choices:
    return own_matmuls(model, lambda which: which in ("qkv", "down"))


def between(model: Decoder) -> Choices:
    return own_matmuls(model, lambda which: which in ("output", "up", "head"))


def slices(model: Decoder) -> Choices:
    """Matmuls of up to 16 rows that norm their inputs themselves, wherever a layer's norms allow it."""
    tiling = SliceTiling(8, 64, 2, folds=True)
    return Choices({matmul: {16: tiling} for matmul in everything(model).table})


def own_matmuls(model: Decoder, chosen: Callable[[str], bool]) -> Choices:
    """Equal matrices with the same epilogue are one matmul: it is ours if any of them is chosen, and if in 16 bits its
    rows consist of whole 16 bytes, as the copy engine has it.
    """
    named = [
        (name, matmul.key)
        for plan in layer_plans(model)
        for name, matmul in zip(names(plan), plan.matmuls, strict=True)
    ]
    if model.lm_head is not None:
        named.append(("head", matmul_of(model.lm_head)))
    ours = [matmul for name, matmul in named if chosen(name) and matmul.in_features % 8 == 0]
    return Choices({matmul: {16: _default(matmul)} for matmul in ours})


def names(plan: LayerPlan) -> tuple[str, ...]:
    if isinstance(plan.mlp, MlpPlan):
        return "qkv", "output", "up", "down"
    return "qkv", "output", "router", *(() if plan.mlp.shared is None else ("shared up", "shared down"))


def _default(matmul: Matmul) -> Tiling:
    return default_tiling(16, matmul.out_features, matmul.in_features, gated=matmul.is_gated, bits=matmul.bits)


class Steps:
    """Carries out steps on two sequences, each with a page of its own."""

    def __init__(
        self,
        model: Model,
        device: torch.device,
        ids: Sequence[list[int]],
        *,
        own: Own | None = None,
        deterministic: bool = False,
        kernel_choices: str = "off",
        adapters: Adapters | None = None,
    ) -> None:
        self.part = GpuPart(
            model.to(device),
            page_size=PAGE,
            num_pages=len(ids),
            max_batch_seqs=len(ids),
            tokens=torch.zeros(1, dtype=torch.int32, device=device),
            captured=0,
            deterministic=deterministic,
            kernel_choices=kernel_choices,
            adapters=adapters,
        )
        assert self.part.decoder is not None
        assert isinstance(model, Decoder)
        if own is not None:
            self.part.decoder.choices = own(model)
        params = SamplingParams()
        self.seqs = [
            EngineSequence(row, Request(id=row, prompt_ids=tuple(each), params=params, seed=0), max_len=PAGE)
            for row, each in enumerate(ids)
        ]
        self.part.attention.tables.update([[row] for row in range(len(ids))])

    def logits(self, spans: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Logits of the tokens from start to end of the first sequences."""
        chunks = [Chunk(seq, start, end - start) for seq, (start, end) in zip(self.seqs, spans, strict=False)]
        inputs = np.full((FIELDS, sum(chunk.length for chunk in chunks)), -1, dtype=np.int32)
        at = 0
        for row, chunk in enumerate(chunks):
            positions, own = np.arange(chunk.start, chunk.end), slice(at, at + chunk.length)
            inputs[TOKEN, own], inputs[POSITION, own] = chunk.seq.token_ids[chunk.start : chunk.end], positions
            inputs[LENGTH, own], inputs[SLOT, own] = chunk.end, row * PAGE + positions
            at += chunk.length
        num_single, tiles = self.part.attention.tile(chunks)
        with torch.inference_mode():
            hidden = self.part.forward(Mixed(inputs, len(chunks), num_single, tiles, adapted=False))
            return list(self.part.head(hidden).float().cpu().split_with_sizes([chunk.length for chunk in chunks]))


def all_logits(steps: Steps) -> list[Tensor]:
    found = [steps.logits([(0, end) for end in PROMPTS])]
    found.append(steps.logits([(end, end + 1) for end in PROMPTS]))
    found.append(steps.logits([(LENGTHS[0] - 1, LENGTHS[0])]))
    return [torch.cat([each[row] for each in found if row < len(each)]) for row in range(len(LENGTHS))]


def some_ids() -> list[list[int]]:
    torch.manual_seed(3)
    return [torch.randint(0, VOCAB, (length,)).tolist() for length in LENGTHS]


# One of each shape of layers: plain, with windows and norms of what is added, with biases and layer norms, in parallel,
# with learned positions, with norms of heads, and mixtures with shared experts, with sinks, and without either.
SHAPES = {"llama", "gemma3", "starcoder2", "gpt_neox", "gpt2", "qwen3", "qwen2_moe", "gpt_oss", "mixtral"}


# NumPy warns where an activation's exponential is infinite, as it may be on a GPU.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
# Each takes seconds in the interpreter. There our own matmuls for several rows run once for each order of the parts.
@pytest.mark.parametrize(
    ("name", "own"),
    [
        *(
            pytest.param(
                name, nothing, id=f"{name}, library's matmuls", marks=[] if name in SHAPES else [pytest.mark.full]
            )
            for name in VARIANTS
        ),
        *(
            pytest.param(
                name,
                own,
                id=f"{name}, {own.__name__.replace('_', ' ')} our own",
                marks=[] if name == "gemma3" else [pytest.mark.full],
            )
            for name in ("llama", "gemma3", "gpt_neox")
            for own in (first_and_last, between)
        ),
        *(
            pytest.param(name, slices, id=f"{name}, slices", marks=[] if name == "gemma3" else [pytest.mark.full])
            for name in ("llama", "gemma3", "olmo2", "gpt_neox", "granite", "qwen2_moe")
        ),
        *(
            pytest.param(
                name,
                everything,
                id=f"{name}, own matmuls",
                marks=[pytest.mark.full]
                if name in ("granite", "olmo2")
                else [slow_in_the_interpreter]
                if name not in ("gemma3", "gpt_neox")
                else [],
            )
            for name in VARIANTS
        ),
    ],
)
def test_fused_layers_give_the_twins_logits(name: str, own: Own, device: torch.device) -> None:
    ids, model = some_ids(), decoder(name)
    expected = [dense_logits(model, each) for each in ids]
    given = all_logits(Steps(model, device, ids, own=own))
    for ours, twins in zip(given, expected, strict=True):
        torch.testing.assert_close(ours, twins, rtol=1e-3, atol=2e-3)


INVARIANT = ("gemma3", "gpt_oss", "olmo2", "gpt_neox", "granite", "qwen2_moe")


@pytest.mark.full
@pytest.mark.parametrize("name", some(INVARIANT, "gemma3", "gpt_oss"))
def test_invariant_layers_give_the_twins_logits_and_the_same_bits_token_by_token(
    name: str, device: torch.device
) -> None:
    ids, model = some_ids()[1:], decoder(name)
    expected = dense_logits(model, ids[0])
    [whole] = Steps(model, device, ids, deterministic=True).logits([(0, len(ids[0]))])
    torch.testing.assert_close(whole, expected, rtol=1e-3, atol=2e-3)
    steps = Steps(model, device, ids, deterministic=True)
    singly = torch.cat([steps.logits([(at, at + 1)])[0] for at in range(len(ids[0]))])
    assert torch.equal(singly, whole)


class Strays:
    """How far logits of a model in 16 bits are from those of the same weights in 32, which no constant tells: these
    weights are wide apart, and few.
    """

    def __init__(self, model: Decoder, ids: Sequence[list[int]]) -> None:
        """Rounds the model's weights, but norms' where the family keeps them in float32."""
        self._exact = torch.cat([dense_logits(model, each) for each in ids])
        for path, parameter in model.named_parameters():
            if "norm" not in path or model.described.norm.offset == 0:
                parameter.data = parameter.data.bfloat16()
        for module in model.modules():
            # A norm without a bias has zeros in its place.
            if isinstance(module, LayerNorm):
                module.bias.data = module.bias.data.bfloat16()
        self._twins = self._of([dense_logits(model, each) for each in ids])

    def check(self, given: Sequence[Tensor]) -> None:
        """Kernels round less often than the twin, which computes in 16 bits; yet chance may bring it nearer."""
        assert self._of(given) < 2 * self._twins

    def _of(self, logits: Sequence[Tensor]) -> float:
        return (torch.cat(list(logits)).float() - self._exact).abs().mean().item()


# torch's notice of a CPU without bfloat16 instructions.
in_16_bits = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


@pytest.mark.gpu
@in_16_bits
@pytest.mark.parametrize("own", [nothing, everything], ids=["library's matmuls", "own matmuls"])
@pytest.mark.parametrize("name", VARIANTS)
def test_16_bit_logits_stray_from_32_bits_no_further_than_the_twins_do(
    name: str, own: Own, device: torch.device
) -> None:
    """With kernels that overlap, and norms that keep their weights in float32 where the model does."""
    # All experts, for rounding would change which are chosen.
    ids, model = some_ids(), decoder(name, num_experts_per_tok=4)
    strays = Strays(model, ids)
    strays.check(all_logits(Steps(model, device, ids, own=own)))


@pytest.mark.gpu
@in_16_bits
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_neox", "qwen3"])
def test_a_model_with_measured_kernels_gives_the_twins_logits(
    name: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path))
    ids, model = some_ids(), decoder(name)
    strays = Strays(model, ids)
    for _ in range(2):
        # The second finds what the first has kept.
        steps = Steps(model, device, ids, kernel_choices="auto")
        strays.check(all_logits(steps))
        assert steps.part.decoder is not None
        assert all(matmul in kept(this_gpu(device)) for matmul in steps.part.decoder.matmuls)


def test_other_models_have_none_for_a_reason() -> None:
    assert why_unfused(random_model(TINY["hrm_text"])) == "its layers run several times per token"
    odd = random_model({**TINY["qwen3_moe"], "moe_intermediate_size": 12})
    assert why_unfused(odd) == "its experts' widths are not multiples of 8"
    for many in ({"num_experts": 513}, {"num_experts": 40, "num_experts_per_tok": 17}):
        refused = why_unfused(random_model({**TINY["qwen3_moe"], **many}))
        assert refused == "it has more than 512 experts in a layer, or 16 for a token"
    for most in ({"num_experts": 512}, {"num_experts": 40, "num_experts_per_tok": 16}):
        assert why_unfused(random_model({**TINY["qwen3_moe"], **most})) is None
    assert {why_unfused(random_model(config)) for config in TINY.values()} == {
        None,
        "its layers run several times per token",
        "its router scales what experts read",
        "its layers differ in their heads",
        "its layers have a mixer or an MLP, not both",
        "its router weighs experts by sigmoids",
    }


@pytest.mark.parametrize("name", VARIANTS)
def test_a_plan_knows_the_matmuls_that_a_loaded_model_has(name: str) -> None:
    model = decoder(name)
    loaded = {
        name: matmul.key
        for plan in kinds(layer_plans(model))
        for name, matmul in zip(names(plan), plan.matmuls, strict=True)
    }
    if model.lm_head is not None:
        loaded["head"] = matmul_of(model.lm_head)
    assert described_matmuls(model.described, 32) == loaded


@pytest.mark.full
def test_norms_fold_into_matmuls_unless_they_are_layer_norms() -> None:
    apart = {name for name in VARIANTS if not all(plan.folds for plan in layer_plans(decoder(name)))}
    assert apart == {name for name in VARIANTS if decoder(name).described.norm.kind == "layer"}
    assert {"gpt2", "llama"} - apart == {"llama"}
