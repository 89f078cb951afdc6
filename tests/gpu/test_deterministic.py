"""`deterministic` on a GPU: a sequence has the same bits alone and in a batch, however its tokens come.

In the interpreter these tests show that the arithmetic takes one path; on a GPU, that the path gives the same bits.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import pytest
import torch
from every_family import TINY
from tiny_models import GEMMA2, LLAMA, MISTRAL, VOCAB, random_model
from torch import Tensor
from triton_device import DEVICE, slow_in_the_interpreter

from ostro.backends.cuda.attention import InvariantAttention, KVPages
from ostro.backends.cuda.fused import FusedDecoder
from ostro.backends.cuda.projections import Fp8Linear
from ostro.backends.cuda.runner import GpuRunner
from ostro.backends.sampling.logprobs import folded, logprob_table
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.engine.runner import TokenLogprob
from ostro.errors import BadRequest
from ostro.kernels.gpu.invariant_attention import invariant_tuning, single_tiles
from ostro.kernels.gpu.prefill_attention import Chunk, prefill_tiles, tokens_in_tile
from ostro.kernels.gpu.step_inputs import StepInputs
from ostro.sampling_params import SamplingParams
from ostro.torch_models.base import Model
from ostro.torch_models.decoder import Decoder, DecoderLayer
from ostro.torch_models.layers import GatedMLP

ON_GPU = DEVICE.type == "cuda"
# The interpreter takes milliseconds for what a GPU does in none: there the models and the prompts are smaller.
SIZES: Mapping[str, object] = {"hidden_size": 256, "intermediate_size": 1280, "head_dim": 64} if ON_GPU else {}
MODELS: Mapping[str, Mapping[str, object]] = {
    "llama": {**LLAMA, "head_dim": 16, **SIZES},
    "qwen3": {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": 16, **SIZES},
    "mistral": {**MISTRAL, "head_dim": 16, **SIZES},
    "gemma2": {**GEMMA2, "head_dim": 16, **SIZES},
    "olmo2": {**LLAMA, "architectures": ["Olmo2ForCausalLM"], "head_dim": 16, **SIZES},
    "gpt_neox": {**LLAMA, "architectures": ["GPTNeoXForCausalLM"], "head_dim": 16, **SIZES},
}
DTYPES = [torch.float32, *(pytest.param(half, marks=pytest.mark.gpu) for half in (torch.float16, torch.bfloat16))]
PAGE = 16
LENGTH = 300 if ON_GPU else 40
Gain = tuple[list[int], list[TokenLogprob], list[TokenLogprob]]


def a_model(name: str, device: torch.device, dtype: torch.dtype) -> Model:
    model = random_model(MODELS[name]).to(device)
    # Not the rotary frequencies, which a loaded model keeps in float32.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


# ---- one decoder, one sequence or two


class Stream:
    """Feeds sequences to the layers in chunks and keeps the logits of each token."""

    def __init__(self, model: Model, device: torch.device, dtype: torch.dtype, rows: int = 2) -> None:
        assert isinstance(model, Decoder)
        shape, self.device = model.shape, device
        self.decoder = FusedDecoder(model, overlaps=False, invariant=True)
        width = -(-LENGTH // PAGE)
        self.pages = KVPages(shape, num_pages=rows * width, page_size=PAGE, dtype=dtype, device=device)
        self.tables = torch.randperm(rows * width, dtype=torch.int32).view(rows, width).to(device)
        self.tuning = invariant_tuning(dtype, shape.num_heads, shape.num_kv_heads, shape.head_dim)
        self.tile = tokens_in_tile(shape.num_heads, shape.num_kv_heads, self.tuning)

    def step(self, tokens: Tensor, chunks: Sequence[Chunk], tiles: Tensor | None = None) -> Tensor:
        at = torch.cat([torch.arange(each.start, each.start + each.length) for each in chunks]).to(self.device)
        rows = torch.cat([torch.full((each.length,), each.row) for each in chunks]).to(self.device)
        slots = self.tables[rows, at // PAGE].long() * PAGE + at % PAGE
        if tiles is None:
            tiles = torch.tensor(prefill_tiles(chunks, self.tile), dtype=torch.int32, device=self.device)
        ctx = InvariantAttention(self.pages, self.tuning, tables=self.tables, slots=slots, tiles=tiles)
        with torch.inference_mode():
            return self.decoder.logits(self.decoder(StepInputs(tokens, at, slots), ctx))

    def logits(self, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        starts = [0, *accumulate(lengths)][:-1]
        return torch.cat(
            [
                self.step(tokens[start : start + length], [Chunk(0, 0, start, length)])
                for start, length in zip(starts, lengths, strict=True)
            ]
        )


@slow_in_the_interpreter
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name",
    [
        *("qwen3", "mistral"),
        *(pytest.param(name, marks=pytest.mark.gpu) for name in ("llama", "gemma2", "olmo2", "gpt_neox")),
    ],
)
def test_logits_have_the_same_bits_however_a_prompt_is_chunked(
    name: str, device: torch.device, dtype: torch.dtype
) -> None:
    model = a_model(name, device, dtype)
    torch.manual_seed(1)
    tokens = torch.randint(0, VOCAB, (LENGTH,)).to(device)
    whole = Stream(model, device, dtype).logits(tokens, [LENGTH])
    assert whole.isfinite().all()
    for lengths in ([1, LENGTH - 1], [17, 16, LENGTH - 33], [LENGTH - 3, 1, 1, 1]):
        assert torch.equal(Stream(model, device, dtype).logits(tokens, lengths), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_have_the_same_bits_token_by_token(device: torch.device, dtype: torch.dtype) -> None:
    model = a_model("qwen3", device, dtype)
    tokens = torch.randint(0, VOCAB, (LENGTH,)).to(device)
    whole = Stream(model, device, dtype).logits(tokens, [LENGTH])
    assert torch.equal(Stream(model, device, dtype).logits(tokens, [1] * LENGTH), whole)


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_have_the_same_bits_beside_another_sequence(device: torch.device, dtype: torch.dtype) -> None:
    model = a_model("qwen3", device, dtype)
    torch.manual_seed(1)
    tokens, others = torch.randint(0, VOCAB, (2, LENGTH)).to(device)
    alone = Stream(model, device, dtype).logits(tokens, [LENGTH])
    both = Stream(model, device, dtype)
    third = LENGTH // 3
    first = both.step(torch.cat((others[:5], tokens[:third])), [Chunk(1, 0, 0, 5), Chunk(0, 5, 0, third)])
    then = both.step(
        torch.cat((tokens[third:-1], others[5:9])),
        [Chunk(0, 0, third, LENGTH - third - 1), Chunk(1, LENGTH - third - 1, 5, 4)],
    )
    # As a graph does it: single tokens, each a tile, the tiles made on the device.
    positions = torch.tensor([LENGTH - 1, 9], dtype=torch.int32, device=device)
    last = both.step(
        torch.stack((tokens[-1], others[9])),
        [Chunk(0, 0, LENGTH - 1, 1), Chunk(1, 1, 9, 1)],
        single_tiles(positions, positions + 1),
    )
    assert torch.equal(torch.cat((first[5:], then[: LENGTH - third - 1], last[:1])), alone)


# ---- whole engines


def asked(
    count: int,
    *,
    shared: int = 0,
    longest: int = 90 if ON_GPU else 14,
    max_tokens: int = 4 if ON_GPU else 3,
    scored: bool = True,
) -> list[Request]:
    """Requests that want all that shows their numbers."""
    torch.manual_seed(2)
    head = torch.randint(0, VOCAB, (shared,)).tolist()
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, logprobs=5, prompt_logprobs=2 if scored else None)
    return [
        Request(
            id=id,
            prompt_ids=(*head, *torch.randint(0, VOCAB, (2 + (5 + id * 7) % longest,)).tolist()),
            params=params,
            seed=id,
            prompt_logprobs_from=1 if scored else None,
        )
        for id in range(count)
    ]


def engine(model: Model, *, pages: int = 256, budget: int = 64, rows: int = 8) -> EngineCore:
    return EngineCore(
        GpuRunner(
            model,
            page_size=PAGE,
            num_pages=pages,
            max_batch_tokens=budget,
            max_batch_seqs=rows,
            deterministic=True,
        )
    )


def run(core: EngineCore, requests: Sequence[Request]) -> dict[int, Gain]:
    for request in requests:
        core.add(request)
    gains: dict[int, Gain] = {request.id: ([], [], []) for request in requests}
    while core.has_work:
        for gain in core.step():
            assert gain.error is None
            tokens, logprobs, scored = gains[gain.request_id]
            tokens += gain.token_ids
            logprobs += gain.logprobs
            scored += gain.prompt_logprobs
    return gains


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_request_has_the_same_numbers_alone_and_in_any_batch(device: torch.device, dtype: torch.dtype) -> None:
    model = a_model("qwen3", device, dtype)
    requests = asked(12 if ON_GPU else 3)
    alone: dict[int, Gain] = {}
    for request in requests[:: 4 if ON_GPU else 2]:
        alone |= run(engine(model), [request])
    for budget, rows in ((64, 8), (9, 3), (512, 12)) if ON_GPU else ((9, 3),):
        together = run(engine(model, budget=budget, rows=rows), requests)
        assert {id: together[id] for id in alone} == alone


@slow_in_the_interpreter
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_has_the_same_numbers_under_any_budget(device: torch.device, dtype: torch.dtype) -> None:
    model = a_model("llama", device, dtype)
    [request] = asked(1, shared=60 if ON_GPU else 8)
    whole = run(engine(model, budget=256), [request])
    # Under a budget of one, each chunk is a single token.
    for budget in (1, 7, 33) if ON_GPU else (1, 7):
        assert run(engine(model, budget=budget, rows=1), [request]) == whole


@slow_in_the_interpreter
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefix_hits_and_preemption_leave_the_numbers_alone(device: torch.device, dtype: torch.dtype) -> None:
    model = a_model("qwen3", device, dtype)
    requests = asked(3, shared=17, longest=14, max_tokens=12, scored=False)
    core = engine(model, pages=4, budget=48, rows=3)
    together = run(core, requests)
    for request in requests if ON_GPU else requests[-1:]:
        assert run(engine(model), [request]) == {request.id: together[request.id]}
    assert core.scheduler.counters.preemptions > 0
    assert core.scheduler.counters.cache_hits > 0


def test_models_that_fused_kernels_do_not_run_are_refused(device: torch.device) -> None:
    odd = {**TINY["qwen3_moe"], "moe_intermediate_size": 12}
    reasons = (TINY["hrm_text"], "its layers run several times"), (odd, "its experts' widths are not multiples of 8")
    for config, reason in reasons:
        with pytest.raises(BadRequest, match=f"needs the fused kernels, .* this model: {reason}") as refusal:
            engine(random_model(config).to(device))
        assert refusal.value.param == "deterministic"


def test_8_bit_weights_are_refused(device: torch.device) -> None:
    model = random_model(MODELS["llama"]).to(device)
    layer = model.get_submodule("model.layers.0")
    assert isinstance(layer, DecoderLayer)
    assert isinstance(layer.mlp, GatedMLP)
    layer.mlp.down_proj = Fp8Linear.quantized(layer.mlp.down_proj)
    with pytest.raises(BadRequest, match="quantize") as refusal:
        engine(model)
    assert refusal.value.param == "deterministic"


# ---- log-probabilities


@pytest.mark.parametrize("width", [1, 64, 2049, 5000])
def test_folded_sums_equal_plain_ones_and_do_not_depend_on_the_rows(device: torch.device, width: int) -> None:
    torch.manual_seed(0)
    weights = torch.rand(300, width, device=device)
    together = folded(weights.clone())
    torch.testing.assert_close(together, weights.double().sum(-1), rtol=1e-6, atol=0)
    for row in (0, 7, 299):
        assert torch.equal(folded(weights[row : row + 1].clone()), together[row : row + 1])


def test_log_probabilities_do_not_depend_on_the_rows_beside_them(device: torch.device) -> None:
    torch.manual_seed(0)
    logits, chosen = torch.randn(50, 3001, device=device) * 4, torch.arange(50, device=device)
    together = logprob_table(logits, chosen, 5)
    for row in (0, 3, 49):
        assert torch.equal(logprob_table(logits[row : row + 1], chosen[row : row + 1], 5), together[row : row + 1])
