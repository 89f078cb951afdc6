"""A GGUF file at its own precision, through the whole of the native path: mixed types, permuted heads, a head apart."""

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from native_models import needs_library

from ostro.backends.loading import load_runner
from ostro.backends.native.runner import NativeRunner
from ostro.config import EngineConfig
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.sampling_params import SamplingParams
from ostro.weights import open_checkpoint

pytestmark = needs_library

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB, LAYERS = 256, 512, 8, 2, 32, 99, 2
TYPES = gguf.GGMLQuantizationType
# As llama.cpp mixes them: some rows finer than others.
MIXES = {
    "Q4_0": {"": TYPES.Q4_0, "output": TYPES.Q8_0},
    "Q4_1": {"": TYPES.Q4_1, "token_embd": TYPES.Q8_0},
    "Q8_0": {"": TYPES.Q8_0},
    "Q5": {"": TYPES.Q5_1, "attn_q": TYPES.Q5_0},
    "Q4_K_M": {"": TYPES.Q4_K, "attn_v": TYPES.Q6_K, "ffn_down": TYPES.Q6_K, "output": TYPES.Q6_K},
    "Q5_K_M": {"": TYPES.Q5_K, "attn_v": TYPES.Q6_K, "output": TYPES.Q6_K},
    "F16": {"": TYPES.F16},
}


def stored(kind: gguf.GGMLQuantizationType, rows: int, cols: int, rng: np.random.Generator) -> npt.NDArray[np.generic]:
    values: npt.NDArray[np.float32] = (rng.standard_normal((rows, cols)) * 1.2 / np.sqrt(cols)).astype(np.float32)
    if kind == TYPES.F16:
        halves: npt.NDArray[np.float16] = values.astype(np.float16)
        return halves
    if kind not in (TYPES.Q4_K, TYPES.Q5_K, TYPES.Q6_K):
        quantized: npt.NDArray[np.uint8] = gguf.quants.quantize(values, kind)
        return quantized
    # Any bits are legal codes and scales; the halves are made small.
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (rows, cols // size * nbytes), dtype=np.uint8)
    blocks = raw.reshape(-1, nbytes)
    for at in (208,) if kind == TYPES.Q6_K else (0, 2):
        spread = 3e-5 if kind == TYPES.Q6_K else 4e-4
        blocks[:, at : at + 2] = (rng.random((len(blocks), 1)) * spread).astype(np.float16).view(np.uint8)
    return raw


def write(path: Path, mix: dict[str, gguf.GGMLQuantizationType]) -> Path:
    rng = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(DIM)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    writer.add_token_merges([])
    shapes = {
        "attn_q": (HEADS * DIM, HIDDEN),
        "attn_k": (KV_HEADS * DIM, HIDDEN),
        "attn_v": (KV_HEADS * DIM, HIDDEN),
        "attn_output": (HIDDEN, HEADS * DIM),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    names = {"token_embd": (VOCAB, HIDDEN), "output": (VOCAB, HIDDEN)}
    names |= {f"blk.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in shapes.items()}
    for name, (rows, cols) in names.items():
        kind = mix.get(name.rpartition(".")[2], mix[""])
        raw = kind in (TYPES.F16, TYPES.F32)
        writer.add_tensor(f"{name}.weight", stored(kind, rows, cols, rng), raw_dtype=None if raw else kind)
    norms = ["output_norm", *(f"blk.{layer}.{name}" for layer in range(LAYERS) for name in ("attn_norm", "ffn_norm"))]
    for name in norms:
        writer.add_tensor(f"{name}.weight", (1 + 0.1 * rng.standard_normal(HIDDEN)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def scores(path: Path, backend: str) -> npt.NDArray[np.float64]:
    """Log-probabilities of a prompt."""
    config = EngineConfig(device="cpu", kv_memory=8 << 20, backend=backend)  # type: ignore[arg-type]
    runner = load_runner(open_checkpoint(path), config)
    assert isinstance(runner, NativeRunner) == (backend == "native")
    core = EngineCore(runner)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    prompt = tuple(np.random.default_rng(7).integers(0, VOCAB, 60).tolist())
    core.add(Request(id=0, prompt_ids=prompt, params=params, seed=0, prompt_logprobs_from=1))
    found: list[float] = []
    while core.has_work:
        for gain in core.step():
            assert gain.error is None
            found += [each.logprob for each in gain.prompt_logprobs]
    return np.array(found)


@pytest.mark.cases(2)
@pytest.mark.parametrize("mix", MIXES)
def test_scores_are_those_of_the_file_unpacked(mix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the rounding of activations, which moves a score by little and the whole by less."""
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path / "cache"))
    path = write(tmp_path / "model.gguf", MIXES[mix])
    given, expected = scores(path, "native"), scores(path, "torch")
    assert expected.std() > 0.1
    off = np.abs(given - expected)
    if mix == "F16":
        assert off.max() < 1e-3
    else:
        assert np.median(off) < 0.05
        assert off.mean() < 0.08


def test_a_file_with_types_that_have_no_kernel_runs_on_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path / "cache"))
    path = write(tmp_path / "model.gguf", {"": TYPES.Q8_0, "attn_v": TYPES.TQ1_0})
    assert len(scores(path, "torch")) == 59
    runner = load_runner(open_checkpoint(path), EngineConfig(device="cpu", kv_memory=8 << 20))
    assert not isinstance(runner, NativeRunner)
    assert not list((tmp_path / "cache").rglob("*.ostro"))
