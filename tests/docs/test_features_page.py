"""The matrix of features: what it asks is what loading says, and no cell depends on how it is asked."""

import json
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from native_models import needs_library
from safetensors.numpy import save_file

from docs_reference import feature_matrix
from docs_reference.feature_matrix import FEATURES, TARGETS, Feature, Target, answer, go_together, pairs
from ostro.backends.loading import load_runner
from ostro.backends.planning import plan
from ostro.backends.tiers.opening import open_tiers
from ostro.config import EngineConfig
from ostro.engine.speculation import speculation
from ostro.errors import BadRequest, OstroError, Unsupported
from ostro.models.registry import describe
from ostro.weights import open_checkpoint
from ostro.weights.described import DescribedCheckpoint

BY_TITLE = {feature.title: feature for feature in FEATURES}
ON_CPU = [target for target in TARGETS if target.settings["device"] == "cpu"]
# These have no files here (a GGUF, an encoder's), or start processes.
NOT_LOADED = {"quantised checkpoint", "encoder", "tensor parallel"}
LOADED = [feature for feature in FEATURES if feature.title not in NOT_LOADED]
FEW = [(feature,) for feature in LOADED]
MANY = list(combinations(LOADED, 2))


def title(value: object) -> str:
    return ", ".join(each.title for each in value) if isinstance(value, tuple) else str(getattr(value, "letter", value))


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Packed weights are not for other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OSTRO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def write(directory: Path, config: feature_matrix.Settings) -> Path:
    """The matrix's model with random weights."""
    directory.mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    tensors = {
        each.name: random.normal(0, 0.02, each.shape).astype(np.float32)
        for each in DescribedCheckpoint.of("model", config).stored().tensors
    }
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(dict(config)))
    return directory


def loaded(target: Target, features: tuple[Feature, ...], tmp_path: Path) -> str | None:
    """Why the model is not loaded with these features; None if it is, and has them."""
    settings: dict[str, object] = dict(target.settings)
    with feature_matrix._adapter() as adapter:
        for feature in features:
            settings |= feature.by_letter.get(target.letter, feature.settings)
            if feature.has_adapter:
                settings["adapters"] = (("a", str(adapter)),)
        if "kv_disk" in settings:
            settings["kv_disk"] = str(tmp_path)
        configs = [feature.config for feature in features if feature.config is not None]
        checkpoint = open_checkpoint(write(tmp_path / "model", (configs or [feature_matrix._DECODER])[0]))
        config = EngineConfig(**settings, kv_memory=1 << 20)  # type: ignore[arg-type]
        try:
            runner = load_runner(checkpoint, config)
            open_tiers(checkpoint, config, runner)
        except OstroError as error:
            return error.message
    assert runner.spec.backend.startswith("native" if target.is_native else "torch")
    assert runner.spec.constrains
    if BY_TITLE["drafts"] in features:
        assert speculation("ngram", runner.spec) is not None
    return None


def check(target: Target, features: tuple[Feature, ...], tmp_path: Path) -> None:
    told, found = answer(target, *features), loaded(target, features, tmp_path)
    assert (told is None) == (found is None), (told, found)


@pytest.mark.cases(4)
@needs_library
@pytest.mark.parametrize("target", ON_CPU, ids=title)
@pytest.mark.parametrize("features", FEW, ids=title)
def test_feature_is_there_where_a_model_loads_with_it(
    target: Target, features: tuple[Feature, ...], tmp_path: Path
) -> None:
    check(target, features, tmp_path)


@pytest.mark.full
@needs_library
@pytest.mark.parametrize("target", ON_CPU, ids=title)
@pytest.mark.parametrize("features", MANY, ids=title)
def test_pair_goes_together_where_a_model_loads_with_both(
    target: Target, features: tuple[Feature, ...], tmp_path: Path
) -> None:
    check(target, features, tmp_path)


@pytest.mark.full
@needs_library
def test_cell_does_not_depend_on_the_order_in_which_it_is_asked() -> None:
    for one, other in pairs():
        for target in TARGETS:
            both, swapped = answer(target, one, other), answer(target, other, one)
            assert (both is None) == (swapped is None), (target.letter, one.title, other.title)


@needs_library
def test_pair_is_nowhere_where_one_of_the_two_is_not() -> None:
    """But where one of them is for the other: experts on the CPU may have bits that a GPU has no kernels for."""
    possible = [
        (target.letter, one.title, other.title)
        for one, other in pairs()
        for target in TARGETS
        if {answer(target, one), answer(target, other)} != {None} and answer(target, one, other) is None
    ]
    assert possible == [("G", "weights in int8", "its experts on the CPU")]


@needs_library
def test_every_feature_is_somewhere_and_every_refusal_says_what_to_do() -> None:
    for feature in FEATURES:
        reasons = [answer(target, feature) for target in TARGETS]
        assert None in reasons, feature.title
        for reason in filter(None, reasons):
            assert any(word in reason for word in ("Leave", "Use", "use", "Set", "leave", "runs on torch")), reason


def test_models_of_the_matrix_are_what_it_calls_them() -> None:
    assert describe(feature_matrix._MIXTURE).has_experts  # type: ignore[union-attr]
    assert not go_together(BY_TITLE["mixture of experts"], BY_TITLE["encoder"])
    assert not go_together(BY_TITLE["weights in int8"], BY_TITLE["weights in fp8"])


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"quantize": "fp8"}, "Matmuls of quantised weights depend on the batch"),
        ({"adapters": (("a", "there"),)}, "the matmuls of adapters depend on the batch"),
    ],
)
def test_deterministic_refuses_on_a_gpu_before_weights_are_read(settings: dict[str, object], told: str) -> None:
    """Its runner refused these only once the weights were loaded, after minutes for a large model."""
    checkpoint = DescribedCheckpoint.of("model", feature_matrix._DECODER)
    config = EngineConfig(device="cuda", deterministic=True, **settings)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match=told):
        plan(checkpoint, config, memory=1 << 30)


def test_drafts_are_refused_where_nothing_verifies_them() -> None:
    """The setting was accepted there, and then nothing was drafted."""
    decoder = DescribedCheckpoint.of("model", feature_matrix._DECODER)
    encoder = DescribedCheckpoint.of("model", feature_matrix._ENCODER)
    with pytest.raises(Unsupported, match="speculative does not work with JAX"):
        plan(decoder, EngineConfig(device="tpu", speculative="ngram"), memory=1 << 30)
    with pytest.raises(BadRequest, match=r"An encoder on torch does not take speculative\. Set it to auto"):
        plan(encoder, EngineConfig(device="cpu", backend="torch", speculative="ngram"), memory=1 << 30)
    for harmless in ("auto", "off"):
        plan(decoder, EngineConfig(device="tpu", speculative=harmless), memory=1 << 30)
        plan(encoder, EngineConfig(device="cpu", speculative=harmless), memory=1 << 30)
