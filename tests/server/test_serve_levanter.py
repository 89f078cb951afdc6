"""`ostro serve --checkpoint-path`: what Levanter wrote is served as the same weights from safetensors are."""

from pathlib import Path

from levanter_directory import TINY_LLAMA, levanter_arrays, write_checkpoint, write_yaml
from live_server import live_server
from model_directory import write_model
from safetensors.torch import load_file

from ostro.weights.json_file import read_json_object


def test_the_newest_checkpoint_of_a_run_gives_the_texts_of_its_export(tmp_path: Path) -> None:
    export = write_model(tmp_path / "export")
    config = read_json_object(export / "config.json")
    arrays = levanter_arrays(load_file(export / "model.safetensors"), config)
    run = tmp_path / "runs" / "llama"
    write_checkpoint(run / "step-1000", arrays, step=1000)
    write_checkpoint(run / "step-900", {name: array * 0 for name, array in arrays.items()}, step=900)
    settings = write_yaml(tmp_path / "llama.yaml", TINY_LLAMA, whole=True)
    texts = []
    options = ("--checkpoint-path", str(run), "--model-config", str(settings), "--tokenizer", str(export))
    for number, args in enumerate((options, (str(export),))):
        directory = tmp_path / str(number)
        directory.mkdir()
        with live_server(directory, *args, "--threads", "1", faults="") as live, live.client() as client:
            body = {"prompts": ["the fox", "the lazy dog"], "max_tokens": 8, "temperature": 0}
            texts.append(client.post("/generate", json=body).json()["completions"])
            assert client.get("/v1/models").json()["data"][0]["id"] in ("llama", "llama-step-1000", "export")
    assert texts[0] == texts[1]
    assert all(texts[0])
