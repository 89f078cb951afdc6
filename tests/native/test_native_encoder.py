"""Encoders on the native core against transformers: every family, in float32, texts of different lengths at once."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from encoder_directory import WIDE, add_modules, reference, write_encoder
from encoder_runs import LENGTHS, run, texts
from native_encoders import native_encoder
from native_models import needs_library

from ostro.backends.loading import load_runner
from ostro.backends.native.encoder import NativeEncoderRunner
from ostro.backends.native.support import MOST_TEXT
from ostro.backends.torch.encoder import EncoderRunner
from ostro.config import EngineConfig
from ostro.errors import BadCheckpoint, BadRequest, Unsupported
from ostro.kernels.cpu.library import instruction_sets, why_missing
from ostro.kernels.cpu.program import Piece
from ostro.weights import Pooling, open_checkpoint

pytestmark = needs_library

MEAN = Pooling("mean", normalize=False)
ISAS = [] if why_missing() else instruction_sets()


def states(model: transformers.PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([ids])).last_hidden_state[0]
        return found


def long_text() -> list[int]:
    """Longer than what a thread takes at a time, and than a step."""
    return torch.randint(5, 64, (300,), generator=torch.Generator().manual_seed(2)).tolist()


@pytest.mark.cases(2)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", WIDE)
def test_vectors_equal_those_of_transformers(name: str, isa: str, tmp_path: Path) -> None:
    model, prompts = reference(WIDE[name]), [*texts(), long_text()]
    expected = torch.stack([states(model, ids).mean(0) for ids in prompts])
    assert expected.std() > 0.2, "the test would not see a difference"
    runner = native_encoder(WIDE[name], model, tmp_path, MEAN, isa=isa)
    torch.testing.assert_close(run(runner, prompts), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", WIDE)
def test_logits_of_pairs_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = reference(WIDE[name], labels=3)
    knows_types = WIDE[name]["model_type"] == "bert"
    pairs, expected = [ids for ids in texts() if len(ids) > 4], []
    for ids in pairs:
        types = {"token_type_ids": torch.tensor([[0] * 4 + [1] * (len(ids) - 4)])} if knows_types else {}
        with torch.inference_mode():
            expected.append(model(torch.tensor([ids]), **types).logits[0])
    runner = native_encoder({**WIDE[name], "num_labels": 3}, model, tmp_path)
    torch.testing.assert_close(run(runner, pairs, second=4), torch.stack(expected), atol=5e-5, rtol=0)


@pytest.mark.cases(2)
@pytest.mark.parametrize("mode", ["cls", "lasttoken", "max", "mean", "mean_sqrt_len_tokens", "weightedmean"])
def test_every_way_of_pooling_is_that_on_torch(mode: str, tmp_path: Path) -> None:
    directory = add_modules(write_encoder(tmp_path / "model", reference(WIDE["bert"])), mode, normalize=False)
    found = [run(_loaded(directory, backend), texts()) for backend in ("native", "torch")]
    torch.testing.assert_close(found[0], found[1], atol=2e-5, rtol=0)


@pytest.mark.parametrize("bits", [0, 8])
def test_a_text_has_the_same_bits_alone_and_among_others(bits: int, tmp_path: Path) -> None:
    prompts = [*texts(), long_text()]
    runner = native_encoder(WIDE["modernbert"], reference(WIDE["modernbert"]), tmp_path, MEAN, bits=bits)
    alone = torch.cat([run(runner, [ids]) for ids in prompts])
    for budget in (1, 20, 1000):
        assert torch.equal(run(runner, prompts, budget=budget), alone)


def test_eight_bits_are_close(tmp_path: Path) -> None:
    model = reference(WIDE["bert"])
    expected = torch.stack([states(model, ids).mean(0) for ids in texts()])
    found = run(native_encoder(WIDE["bert"], model, tmp_path, MEAN, bits=8), texts())
    assert 0.99 < torch.cosine_similarity(found, expected).min() < 0.999999


def test_a_layer_is_a_stride(tmp_path: Path) -> None:
    """A long text is computed in one step, and an engine that reports nothing for a minute is ended."""
    model = reference(WIDE["bert"])
    runner = native_encoder(WIDE["bert"], model, tmp_path, MEAN)
    run(runner, [long_text()])
    assert runner.strides == model.config.num_hidden_layers


# ---- loading


def _loaded(directory: Path, backend: str = "auto", **settings: object) -> EncoderRunner | NativeEncoderRunner:
    config = EngineConfig(device="cpu", backend=backend, threads=1, **settings)  # type: ignore[arg-type]
    runner = load_runner(open_checkpoint(directory), config)
    assert isinstance(runner, EncoderRunner | NativeEncoderRunner)
    return runner


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = torch.Generator().manual_seed(3)
    dense = torch.randn(8, 64, generator=generator), torch.randn(8, generator=generator)
    path = tmp_path_factory.mktemp("encoders") / "bert"
    return add_modules(write_encoder(path, reference(WIDE["bert"])), dense=[dense])


def test_an_encoder_runs_natively_and_says_in_what_precision(directory: Path) -> None:
    spec = _loaded(directory).spec
    assert (spec.backend, spec.precision) == (f"native ({ISAS[0]})", "F32 weights")
    spec = _loaded(directory, quantize="int8").spec
    assert (spec.backend, spec.precision) == (f"native ({ISAS[0]})", "int8 and F32 weights")


def test_dense_modules_are_those_on_torch(directory: Path) -> None:
    found = [run(_loaded(directory, backend), texts()) for backend in ("native", "torch")]
    assert found[0].shape == (len(LENGTHS), 8)
    torch.testing.assert_close(found[0], found[1], atol=2e-5, rtol=0)


def test_dense_modules_give_a_text_the_same_bits_alone_and_among_others(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(4)
    dense = [(torch.randn(64, 64, generator=generator) / 8, torch.randn(64, generator=generator)) for _ in range(2)]
    directory = add_modules(write_encoder(tmp_path / "model", reference(WIDE["bert"])), dense=dense)
    runner, prompts = _loaded(directory, "native"), texts()
    alone = torch.cat([run(runner, [ids]) for ids in prompts])
    assert torch.equal(run(runner, prompts), alone)


def test_packed_weights_are_found_again(directory: Path) -> None:
    first = run(_loaded(directory, "native"), texts())
    assert torch.equal(run(_loaded(directory, "native"), texts()), first)


def test_model_without_native_kernels_runs_on_torch_or_is_refused_by_name(tmp_path: Path) -> None:
    narrow = {**WIDE["bert"], "num_attention_heads": 8}
    directory = write_encoder(tmp_path / "model", reference(narrow))
    assert _loaded(directory).spec.backend == "torch (cpu)"
    with pytest.raises(Unsupported, match=r"backend is native, .* this model: its heads are 8 wide.*run on torch"):
        _loaded(directory, "native")


def test_a_context_too_long_for_native_tables_runs_on_torch(tmp_path: Path) -> None:
    """Rotations of 90,000,000 positions took 9 GB, and then there was a MemoryError."""
    model = reference(WIDE["modernbert"])
    directory = write_encoder(tmp_path / "model", model, {"max_position_embeddings": MOST_TEXT + 1})
    assert _loaded(directory).spec.backend == "torch (cpu)"
    with pytest.raises(Unsupported, match="its context of 1,048,577 tokens is longer"):
        _loaded(directory, "native")
    assert _loaded(directory, "native", max_seq_len=320).spec.max_seq_len == 320


def test_settings_without_effect_are_refused_by_name(directory: Path) -> None:
    for name, value in {"kv_dtype": "int8", "page_size": 16, "kv_memory": 1 << 20}.items():
        with pytest.raises(BadRequest, match=f"An encoder does not take {name}"):
            _loaded(directory, "native", **{name: value})
    with pytest.raises(BadRequest, match="An encoder on torch does not take quantize"):
        _loaded(directory, "torch", quantize="int8")


def test_a_dense_module_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    dense = torch.full((8, 64), float("nan")), torch.zeros(8)
    directory = add_modules(write_encoder(tmp_path / "model", reference(WIDE["bert"])), dense=[dense])
    with pytest.raises(BadCheckpoint, match=r"'linear.weight' holds NaN"):
        _loaded(directory, "native")


def test_a_batch_that_is_out_of_bounds_is_refused(tmp_path: Path) -> None:
    program = native_encoder(WIDE["bert"], reference(WIDE["bert"]), tmp_path, MEAN).program

    def given(start: int = 0, types: tuple[int, ...] = (0, 1)) -> None:
        tokens, none = np.array([1, 2], np.int32), np.zeros(0, np.int32)
        program.run(tokens, [Piece(0, start, 2, none)], none, types=np.array(types, np.int32))

    given()
    with pytest.raises(AssertionError, match="a token's type is 99"):
        given(types=(0, 99))
    with pytest.raises(AssertionError, match="a token's type is -1"):
        given(types=(-1, 0))
    with pytest.raises(AssertionError, match="a sequence's first position is 319, not from 0 to 318"):
        given(start=319)
