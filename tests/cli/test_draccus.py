"""Command lines in the style of Levanter's configuration library."""

from pathlib import Path

import pytest
from warm_start import warm_run

from ostro.cli import main
from ostro.cli.serve import translate
from ostro.errors import BadRequest


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("port=9000", "--port=9000"),
        ("--port=9000 ./m", "--port=9000 ./m"),
        ("--hf_checkpoint ./m --max_batch_seqs=3", "--hf-checkpoint ./m --max-batch-seqs=3"),
        ("--hf_checkpoint=./m", "--hf-checkpoint=./m"),
        ("server.port=1 --serve.hrm.device cpu", "--port=1 --device cpu"),
        ("--service.max_seqs 4 --trainer.mp=p=f32,c=bf16", "--service.max_seqs 4 --trainer.mp=p=f32,c=bf16"),
        ("--engine.max_seqs 4 engine.page_size=32", "--service.max_seqs 4 --service.page_size=32"),
        ("trainer.mp=f32", "--trainer.mp=f32"),
        ("--access_log false", "--no-access-log"),
        ("access_log=true", "--access-log"),
        ("--no-ui true --ui=False", "--no-ui --no-ui"),
        ("--disable_cuda_graph=false", ""),
        ("--ui ./true-model", "--ui ./true-model"),
    ],
)
def test_a_command_line_of_levanters_is_read(given: str, ours: str) -> None:
    assert translate(given.split()) == ours.split()


def test_ai_os_subcommand_means_serve_unless_there_is_a_model_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for a model, beside the one of --model-path."""
    monkeypatch.chdir(tmp_path)
    words = ["hrm", "--model-path", "brains/one", "--device", "cpu"]
    assert translate(words) == words[1:]
    assert translate(["--port", "1", "hrm"]) == ["--port", "1", "hrm"]
    (tmp_path / "hrm").mkdir()
    assert translate(words) == words


@pytest.mark.parametrize(
    "words",
    [
        "tiny=./model",
        "qwen2.5-coder=./model",
        "org/name=./model",
        "--model port=./model",
        "--ui --lora port=./adapter",
        "--api-key a=b",
        "./a=b",
        "-- port=9000",
        "--no-such-flag",
        "--port",
    ],
)
def test_words_that_are_not_settings_are_unchanged(words: str) -> None:
    assert translate(words.split()) == words.split()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--trainer.num_train_steps 5", "--trainer.num_train_steps is not supported: a server does not train"),
        ("trainer.tracker.type=wandb", "--trainer.tracker.type is not supported: a server does not train"),
        ("--model.num_layers=3", "--model-config FILE"),
        ("--service.max_pages 64", "write --max-running-tokens, which is max_pages times page_size"),
        ("--engine.max_pages=64", "--engine.max_pages is not supported: write --max-running-tokens"),
        ("--trainer.mesh.axes x", "trainer.mesh.axes.model is used: the number of devices, --tensor-parallel"),
        ("--wandb.project x", "there is no section wandb here"),
        ("prot=9000", "neither SETTING=VALUE nor NAME=MODEL. Did you mean port"),
        ("foo.bar=1", "foo.bar=1 is neither SETTING=VALUE"),
        ("--ui=perhaps", "--ui is a switch: its value is true or false, got 'perhaps'"),
    ],
)
def test_a_key_that_stands_for_nothing_is_refused_with_what_to_write(words: str, complaint: str) -> None:
    with pytest.raises(BadRequest, match=complaint):
        translate(words.split())


def test_the_command_itself_reads_them(tmp_path: Path) -> None:
    args = "port=9000 --service.max_seqs 4 --trainer.mp p=f32,c=bfloat16 --hf_checkpoint ./m tiny=./n --print_config"
    ran = warm_run(["serve", *args.split()], cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    for line in ("port: 9000", "max_batch_seqs: 4", 'dtype: "bfloat16"', 'model: ["tiny=./n", "./m"]'):
        assert line in ran.stdout


def test_a_refused_key_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--optimizer.learning_rate", "1"]) == 2
    assert capsys.readouterr().err == (
        "ostro: --optimizer.learning_rate is not supported: a server does not train; leave it out.\n"
    )
