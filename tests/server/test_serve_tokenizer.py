"""`ostro serve --tokenizer`: fetched by the process that fetches models, and told apart from the model in errors."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import Hub, hub_environment, running_hub
from live_server import live_server
from model_directory import write_model
from warm_start import warm_run

from ostro.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "export")


@pytest.fixture(scope="module")
def hub(export: Path) -> Iterator[Hub]:
    with running_hub({"acme/tiny": {path.name: path.read_bytes() for path in export.iterdir()}}) as hub:
        yield hub


@pytest.mark.full
def test_a_model_is_served_with_a_tokenizer_of_the_hub(hub: Hub, export: Path, tmp_path: Path) -> None:
    bare = write_model(tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    environment = hub_environment(hub.address, tmp_path / "hf")
    with live_server(tmp_path, str(bare), "--tokenizer", "acme/tiny", env=environment) as live, live.client() as client:
        answer = client.post("/tokenize", json={"prompt": "the lazy dog"})
        assert answer.json()["tokens"] == Tokenizer.load(export).encode("the lazy dog")
    assert "model.safetensors" not in hub.served


def test_a_tokenizer_that_cannot_be_had_is_named(hub: Hub, tmp_path: Path) -> None:
    bare = write_model(tmp_path / "bare")
    command = ["serve", "--port", "0", str(bare), "--tokenizer", "acme/none"]
    environment = hub_environment(hub.address, tmp_path / "hf") | {"OSTRO_FAULTS": "fake"}
    result = warm_run(command, environment=environment, cwd=tmp_path)
    assert result.returncode == 1
    assert "ostro: The tokenizer acme/none cannot be used. The Hub has no repository acme/none" in result.stderr
