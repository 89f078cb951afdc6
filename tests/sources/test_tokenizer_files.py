"""A tokenizer that is named apart from its model: from wherever a model may come, without its weights."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import Hub, hub_environment, running_hub
from hrm_brain import write_brain
from levanter_directory import TINY_LLAMA, levanter_arrays, write_checkpoint, write_yaml
from model_directory import write_model
from object_stores import running_store
from safetensors.torch import load_file
from warm_start import warm_run

from ostro import LLM, EngineConfig
from ostro.errors import ModelNotFound
from ostro.formats.json_file import read_json_object
from ostro.sources.store import ModelStore
from ostro.sources.tokenizer_files import fetch_tokenizer, find_tokenizer, naming_tokenizer
from ostro.text.tokenizer import Tokenizer

TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "config.json"}

PROGRAM = """
import json, sys
from ostro import LLM, EngineConfig
from ostro.errors import OstroError
reference, models = sys.argv[1], json.loads(sys.argv[2])
for model, settings in models:
    try:
        print(LLM(model, EngineConfig(tokenizer=reference, threads=1, **settings)).tokenizer.encode("the dog"))
    except OstroError as error:
        print(type(error).__name__, error.param, error.message)
"""


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "export")


@pytest.fixture(scope="module")
def hub(export: Path) -> Iterator[Hub]:
    files = {path.name: path.read_bytes() for path in export.iterdir()}
    with running_hub({"acme/tiny": files, "old-tiny": files, "acme/bare": {"config.json": b"{}"}}) as hub:
        yield hub


@pytest.fixture(scope="module")
def models(export: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, dict[str, str]]]:
    """One of each kind, none with a tokenizer of its own but the last: with the settings that each needs."""
    root = tmp_path_factory.mktemp("kinds")
    bare = write_model(root / "bare")
    (bare / "tokenizer.json").unlink()
    arrays = levanter_arrays(load_file(export / "model.safetensors"), read_json_object(export / "config.json"))
    write_checkpoint(root / "step-10", arrays, step=10)
    settings = write_yaml(root / "llama.yaml", TINY_LLAMA)
    brain = write_brain(root / "brain", vocab=Tokenizer.load(export).vocab_size)
    gguf = fetch_tokenizer("smollm2-135m", progress=False)
    levanter = (str(root / "step-10"), {"model_config": str(settings)})
    return [(str(bare), {}), levanter, (str(brain), {}), (str(gguf), {})]


def run(hub: Hub | str, home: Path, reference: str, models: list[tuple[str, dict[str, str]]]) -> list[str]:
    """What a process says of each model with this tokenizer."""
    environment = hub_environment(hub if isinstance(hub, str) else hub.address, home)
    result = warm_run([reference, json.dumps(models)], program=PROGRAM, environment=environment, cwd=home, timeout=300)
    result.check_returncode()
    return result.stdout.splitlines()


@pytest.mark.full
@pytest.mark.parametrize("reference", ["acme/tiny", pytest.param("old-tiny", marks=pytest.mark.full)])
def test_every_kind_of_model_takes_a_tokenizer_of_the_hub(
    hub: Hub, export: Path, models: list[tuple[str, dict[str, str]]], tmp_path: Path, reference: str
) -> None:
    hub.served.clear()
    kinds = models if reference == "acme/tiny" else models[:1]
    expected = [str(Tokenizer.load(export).encode("the dog"))] * len(kinds)
    assert run(hub, tmp_path, reference, kinds) == expected
    assert set(hub.served) == TOKENIZER
    # Nothing listens there.
    assert run("http://127.0.0.1:9", tmp_path, reference, kinds[:1]) == expected[:1]


@pytest.mark.full
@pytest.mark.parametrize(
    ("reference", "reason"),
    [("acme/none", "The Hub has no repository acme/none"), ("acme/bare", "acme/bare has no tokenizer on the Hub")],
)
def test_errors_name_the_tokenizer(
    hub: Hub, models: list[tuple[str, dict[str, str]]], tmp_path: Path, reference: str, reason: str
) -> None:
    [told] = run(hub, tmp_path, reference, models[:1])
    assert told.startswith(f"ModelNotFound tokenizer The tokenizer {reference} cannot be used. {reason}")


def test_only_the_tokenizer_of_a_bucket_model_is_fetched(
    export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path / "cache"))
    files = {path.name: path.read_bytes() for path in export.iterdir()}
    with running_store("gs") as store:
        for name, value in store.environment(store.url).items():
            monkeypatch.setenv(name, value)
        reference = store.put_model("models/acme/tiny", files)
        assert find_tokenizer(reference) is None
        path = fetch_tokenizer(reference, progress=False)
        assert {file.name for file in path.iterdir() if not file.name.startswith(".")} == TOKENIZER
        nothing = store.put_model("models/acme/none", {"model.safetensors": b"-"})
        with pytest.raises(ModelNotFound, match="There is no tokenizer at gs://"):
            fetch_tokenizer(nothing, progress=False)
        # It is not taken for the model.
        assert LLM(reference, EngineConfig(threads=1)).name == "acme/tiny"
    assert len(ModelStore().entries()) == 2
    found = find_tokenizer(reference)
    assert found is not None
    assert (found / "model.safetensors").is_file()


def test_what_is_on_the_disk_is_taken_as_it_is(export: Path, tmp_path: Path) -> None:
    gguf = fetch_tokenizer("smollm2-135m", progress=False)
    (tmp_path / "one.gguf").symlink_to(gguf)
    places = {export: export, export / "tokenizer.json": export, gguf: gguf, tmp_path: tmp_path / "one.gguf"}
    for reference, path in places.items():
        assert find_tokenizer(str(reference)) == fetch_tokenizer(str(reference), progress=False) == path
    told = r"The tokenizer \./nowhere cannot be used\. There is no file or directory"
    with pytest.raises(ModelNotFound, match=told), naming_tokenizer("./nowhere"):
        fetch_tokenizer("./nowhere", progress=False)
