"""`ostro serve --checkpoint-path`: what Levanter wrote is served as the same weights from safetensors are."""

from pathlib import Path

import yaml
from levanter_directory import TINY_LLAMA, levanter_arrays, write_checkpoint, write_yaml
from live_server import live_server
from model_directory import write_model
from safetensors.torch import load_file

from ostro import LLM, SamplingParams
from ostro.formats.json_file import read_json_object


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


def test_the_yaml_that_trained_a_run_serves_it_as_config(tmp_path: Path) -> None:
    export = write_model(tmp_path / "export")
    arrays = levanter_arrays(load_file(export / "model.safetensors"), read_json_object(export / "config.json"))
    write_checkpoint(tmp_path / "runs" / "step-10", arrays, step=10)
    training = tmp_path / "train.yaml"
    content = {
        "model": dict(TINY_LLAMA),
        "trainer": {"mp": "p=f32,c=bfloat16", "num_train_steps": 10},
        "data": {"tokenizer": str(export), "cache_dir": "gs://elsewhere"},
        "optimizer": {"learning_rate": 0.1},
        "checkpoint_path": str(tmp_path / "runs"),
    }
    training.write_text(yaml.safe_dump(content))
    options = ("--config", str(training), "--threads", "1", "--device", "cpu")
    with live_server(tmp_path, *options, faults="") as live, live.client() as client:
        body = {"prompts": ["the fox"], "max_tokens": 8, "temperature": 0}
        [text] = client.post("/generate", json=body).json()["completions"]
        [expected] = LLM(export).generate("the fox", SamplingParams(max_tokens=8, temperature=0))
        assert text == expected.text
        [note] = [line for line in live.log_text.splitlines() if "Levanter training config" in line]
        for name in ("optimizer", "trainer.num_train_steps", "data.cache_dir"):
            assert name in note.partition("ignored: ")[2]
