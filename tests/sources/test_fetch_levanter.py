"""Levanter's checkpoints in real stores: fetched without what is not read, then opened from the cache."""

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from fault_proxy import FaultProxy
from levanter_directory import Generation, files_of, levanter_arrays, write_checkpoint, write_yaml
from object_stores import ObjectStore

from ostro.errors import ModelNotFound
from ostro.sources.address import parse_address
from ostro.sources.fetch import fetch_model
from ostro.sources.store import MANIFEST
from ostro.torch_models.build import build_model
from ostro.torch_models.loading import places_of
from ostro.weights.levanter_checkpoint import LevanterCheckpoint, is_levanter, open_levanter

pytest_plugins = ["store_fixtures"]
pytestmark = pytest.mark.usefixtures("cache")

ONE_STORE = pytest.mark.parametrize("store", ["gcs_store"], indirect=True)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
SETTINGS = {
    "type": "llama",
    "hidden_dim": 16,
    "intermediate_dim": 24,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_seq_len": 64,
}
_numbers = iter(range(10**6))


@pytest.fixture
def prefix() -> str:
    """No two tests share objects."""
    return f"runs-{next(_numbers)}/llama"


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    places = places_of(build_model(CONFIG, dtype=torch.float32))
    return {name: torch.randn(place.shape) for name, place in places.items()}


def put_checkpoint(
    store: ObjectStore, prefix: str, directory: Path, generation: Generation = "manifest", *, step: int = 1000
) -> str:
    written = write_checkpoint(
        directory / f"step-{step}", levanter_arrays(weights(step), CONFIG), generation=generation, step=step
    )
    return store.put_model(f"{prefix}/step-{step}", files_of(written))


def opened(reference: str, directory: Path) -> LevanterCheckpoint:
    path = fetch_model(reference, progress=False)
    assert is_levanter(path)
    return open_levanter(path, write_yaml(directory / "m.yaml", SETTINGS), name=parse_address(reference).name)


def assert_same(checkpoint: LevanterCheckpoint, expected: dict[str, torch.Tensor]) -> None:
    loaded = dict(checkpoint.tensors())
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def names_in(path: Path) -> set[str]:
    return set(files_of(path)) - {MANIFEST}


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("store", "generation"),
    [*(("gcs_store", generation) for generation in get_args(Generation)), ("s3_store", "manifest")],
    indirect=["store"],
)
def test_a_checkpoint_is_fetched_and_opened(
    store: ObjectStore, proxy: FaultProxy, prefix: str, tmp_path: Path, generation: Generation
) -> None:
    checkpoint = opened(put_checkpoint(store, prefix, tmp_path, generation), tmp_path)
    assert checkpoint.name == "llama-step-1000"
    assert_same(checkpoint, weights(1000))


@pytest.mark.full
@ONE_STORE
def test_the_optimizers_state_stays_where_it_is(
    store: ObjectStore, proxy: FaultProxy, prefix: str, tmp_path: Path
) -> None:
    reference = put_checkpoint(store, prefix, tmp_path, "directories")
    names = names_in(fetch_model(reference, progress=False))
    assert any(name.startswith("opt_state/") for name in files_of(tmp_path / "step-1000"))
    assert {name.split("/")[0] for name in names} == {"metadata.json", "model"}


@ONE_STORE
def test_every_file_of_a_database_is_fetched(
    store: ObjectStore, proxy: FaultProxy, prefix: str, tmp_path: Path
) -> None:
    reference = put_checkpoint(store, prefix, tmp_path)
    store.put(f"{prefix}/step-1000/notes.txt", b"words")
    assert names_in(fetch_model(reference, progress=False)) == set(files_of(tmp_path / "step-1000"))


@pytest.mark.full
@ONE_STORE
def test_only_the_newest_complete_checkpoint_of_a_run_is_fetched(
    store: ObjectStore, proxy: FaultProxy, prefix: str, tmp_path: Path
) -> None:
    for step in (900, 1000, 20):
        run = put_checkpoint(store, prefix, tmp_path, step=step).rpartition("/")[0]
    put_checkpoint(store, prefix, tmp_path, step=2000)
    store.delete(f"{prefix}/step-2000/metadata.json")
    checkpoint = opened(run, tmp_path)
    assert checkpoint.name == "llama-step-1000"
    assert {name.split("/")[0] for name in names_in(checkpoint.path.parent)} == {"step-1000"}
    assert_same(checkpoint, weights(1000))


@ONE_STORE
def test_an_incomplete_checkpoint_is_not_fetched(
    store: ObjectStore, proxy: FaultProxy, prefix: str, tmp_path: Path
) -> None:
    reference = put_checkpoint(store, prefix, tmp_path)
    store.delete(f"{prefix}/step-1000/metadata.json")
    with pytest.raises(ModelNotFound, match=r"incomplete: it has no metadata\.json"):
        fetch_model(reference, progress=False)
    with pytest.raises(ModelNotFound, match=r"incomplete: it has no step-1000/metadata\.json"):
        fetch_model(reference.rpartition("/")[0], progress=False)


@pytest.mark.full
@ONE_STORE
def test_a_tokenizer_beside_the_weights_comes_with_them(
    store: ObjectStore, proxy: FaultProxy, prefix: str, tmp_path: Path
) -> None:
    reference = put_checkpoint(store, prefix, tmp_path)
    store.put(f"{prefix}/step-1000/tokenizer.json", b"{}")
    checkpoint = opened(reference, tmp_path)
    assert checkpoint.tokenizer_path == checkpoint.path


@pytest.mark.full
@ONE_STORE
def test_a_model_of_the_hub_beside_checkpoints_is_still_that_model(
    store: ObjectStore, proxy: FaultProxy, prefix: str, tmp_path: Path
) -> None:
    put_checkpoint(store, prefix, tmp_path)
    reference = store.put_model(prefix, {"config.json": b"{}", "model.safetensors": b"-"})
    assert names_in(fetch_model(reference, progress=False)) == {"config.json", "model.safetensors"}
