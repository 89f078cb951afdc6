"""LoRA adapters on the native core: the tokens and scores of torch's, and to the last bit those of the row alone."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from native_directory import WIDE, load, packed_files, write
from native_models import native, needs_library, packed, savable_model
from peft_directory import DOWN, OF_ANY, random_adapter
from test_native_runner import CONFIGS, Gains, prompt, tokens

from ostro.backends.native.lora import NativeAdapters
from ostro.backends.native.runner import NativeRunner
from ostro.backends.torch.runner import TorchRunner
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.engine.runner import ModelRunner
from ostro.engine.scheduler import Limits
from ostro.errors import BadCheckpoint
from ostro.kernels.cpu.library import instruction_sets
from ostro.models.architecture import Architecture
from ostro.models.registry import describe
from ostro.sampling_params import SamplingParams
from ostro.torch_models.lora import Adapters
from ostro.weights.adapter import LowRank, read_adapter

pytestmark = needs_library

Terms = Mapping[str, Mapping[str, LowRank]]
SCORED = SamplingParams(max_tokens=6, temperature=0, logprobs=2, prompt_logprobs=0)


def adapters_of(name: str, directory: Path) -> Terms:
    """Adapters of different ranks and for different projections; the last changes one kind alone."""
    model = savable_model(CONFIGS[name])
    # Of a mixture of experts they change attention.
    last = ("o_proj", "out_proj") if "num_experts_per_tok" in CONFIGS[name] else DOWN
    made = {
        "a": random_adapter(directory / "a", model, rank=4, seed=1, targets=OF_ANY),
        "b": random_adapter(directory / "b", model, rank=9, seed=2, targets=OF_ANY),
        "one": random_adapter(directory / "one", model, rank=2, seed=3, targets=last, spread=0.5),
    }
    return {each: read_adapter(path) for each, path in made.items()}


def natively(name: str, terms: Terms, path: Path, *, bits: int = 0, isa: str | None = None) -> NativeRunner:
    described = describe(CONFIGS[name])
    assert isinstance(described, Architecture)
    weights = packed(CONFIGS[name], savable_model(CONFIGS[name]), path, bits=bits, isa=isa)
    return native(weights, isa=isa, pages=128, adapters=NativeAdapters(described, terms))


def on_torch(name: str, terms: Terms) -> TorchRunner:
    model = savable_model(CONFIGS[name])
    adapters = Adapters(model, terms)
    adapters.attach(model)
    states = 16 if model.states else 0
    return TorchRunner(model, page_size=16, num_pages=128, num_states=states, adapters=adapters)


def run(runner: ModelRunner, asked: list[Request], *, budget: int = 64) -> Gains:
    core = EngineCore(
        runner,
        Limits(max_batch_tokens=budget, max_batch_seqs=8),
        prefix_caching=False,
        adapters=("a", "b", "one"),
    )
    gains: Gains = {(each.id, 0): ([], [], []) for each in asked}
    for each in asked:
        core.add(each)
    while core.has_work:
        for gain in core.step():
            assert gain.error is None
            found = gains[gain.request_id, gain.choice]
            found[0].extend(gain.token_ids)
            found[1].extend(gain.logprobs)
            found[2].extend(gain.prompt_logprobs)
    return gains


def requests() -> list[Request]:
    """The base's among them, and two neighbours that share an adapter."""
    return [
        Request(
            id=id,
            prompt_ids=prompt(id, length),
            params=SCORED,
            seed=id,
            prompt_logprobs_from=1,
            adapter=adapter,
        )
        for id, (length, adapter) in enumerate([(5, "a"), (17, None), (9, "b"), (33, "b"), (1, "one"), (12, None)])
    ]


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_and_scores_are_torchs(name: str, tmp_path: Path) -> None:
    terms = adapters_of(name, tmp_path)
    expected = run(on_torch(name, terms), requests())
    given = run(natively(name, terms, tmp_path / "packed"), requests())
    assert tokens(given) == tokens(expected)
    for key, (_, logprobs, scored) in expected.items():
        for ours, theirs in ((given[key][1], logprobs), (given[key][2], scored)):
            assert [each.logprob for each in ours] == pytest.approx([each.logprob for each in theirs], abs=2e-3)


@pytest.mark.full
@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize("name", ["llama", "gemma2", "odd"])
def test_a_row_is_the_same_alone_and_beside_rows_of_other_adapters(name: str, bits: int, tmp_path: Path) -> None:
    terms = adapters_of(name, tmp_path)
    runner = natively(name, terms, tmp_path / "packed", bits=bits)
    together = run(runner, requests())
    for each in requests():
        assert run(runner, [each])[each.id, 0] == together[each.id, 0]
    for budget in (1, 2, 7, 16):
        assert run(runner, requests(), budget=budget) == together


def test_rows_without_an_adapter_are_the_bases_to_the_last_bit(tmp_path: Path) -> None:
    terms = adapters_of("llama", tmp_path)
    adapted = run(natively("llama", terms, tmp_path / "adapted"), requests())
    plain = [each for each in requests() if each.adapter is None]
    base = run(native(packed(CONFIGS["llama"], savable_model(CONFIGS["llama"]), tmp_path / "base")), plain)
    assert {key: adapted[key] for key in base} == base


def test_adapters_change_what_is_generated(tmp_path: Path) -> None:
    runner = natively("llama", adapters_of("llama", tmp_path), tmp_path / "packed")
    found = [
        run(runner, [Request(id=0, prompt_ids=(1, 2, 3), params=SCORED, seed=0, prompt_logprobs_from=1, adapter=each)])
        for each in (None, "a", "b", "one")
    ]
    assert len({tuple(each[0, 0][2]) for each in found}) == 4


@pytest.mark.parametrize("isa", instruction_sets() if needs_library.args[0] is False else [])
def test_every_instruction_set_gives_torchs_tokens(isa: str, tmp_path: Path) -> None:
    terms = adapters_of("llama", tmp_path)
    given = run(natively("llama", terms, tmp_path / "packed", isa=isa), requests())
    assert tokens(given) == tokens(run(on_torch("llama", terms), requests()))


def test_a_model_with_adapters_loads_natively_from_its_bases_packed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path / "cache"))
    directory = write(tmp_path / "model")
    load(directory)
    [file] = packed_files()
    adapter = random_adapter(tmp_path / "adapter", savable_model(WIDE))
    assert isinstance(load(directory, adapters=(("a", str(adapter)),)), NativeRunner)
    assert packed_files() == [file]


def test_an_adapter_of_another_model_is_refused_before_anything_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path / "cache"))
    directory = write(tmp_path / "model")
    narrow = {**WIDE, "intermediate_size": 64}
    adapter = random_adapter(tmp_path / "adapter", savable_model(narrow))
    with pytest.raises(BadCheckpoint, match="the adapter may have been made for another model"):
        load(directory, adapters=(("a", str(adapter)),))
    assert packed_files() == []
