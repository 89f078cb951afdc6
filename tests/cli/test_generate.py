import json
import os
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from model_directory import write_model
from terminal import terminal

from ostro.cli import main

OSTRO = (sys.executable, "-m", "ostro")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def generate(model: Path, *args: str) -> int:
    return main(["generate", "--model", str(model), "--threads", "1", "--temperature", "0", "--ignore-eos", *args])


def test_a_prompt_is_completed_on_the_terminal(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(model, "the fox", "--max-tokens", "8") == 0
    streamed = capsys.readouterr()
    assert streamed.out.endswith("\n")
    assert len(streamed.out) > 3
    assert generate(model, "the fox", "--max-tokens", "8") == 0
    assert capsys.readouterr().out == streamed.out


def test_a_terminal_shows_how_far_the_start_is(model: Path, tmp_path: Path) -> None:
    args = ("generate", "--model", str(model), "--max-tokens", "2", "--device", "cpu", "the fox")
    with terminal(*args, env={"OSTRO_CACHE": str(tmp_path)}) as screen:
        assert screen.end() == 0
    assert "\npacking the weights, once" in screen.shown


def test_a_file_of_prompts_becomes_json_lines_in_order(model: Path, tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("the fox\n\nthe lazy dog\nüber\n")
    assert generate(model, "--prompts", str(prompts), "--output", str(output), "--max-tokens", "5", "--n", "2") == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == ["the fox", "the lazy dog", "über"]
    for line in lines:
        assert [choice["index"] for choice in line["choices"]] == [0, 1]
        assert line["usage"]["completion_tokens"] == 10
        assert line["usage"]["total_tokens"] == line["usage"]["prompt_tokens"] + 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "prompts.txt"]


@pytest.mark.full
def test_standard_input_is_a_prompt(model: Path) -> None:
    done = subprocess.run(
        [*OSTRO, "generate", "-", "--model", model, "--max-tokens", "8", "--seed", "1", "--ignore-eos"],
        input="the fox",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip()
    assert done.stderr == ""


def test_a_chat_prompt_goes_through_the_template(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(model, "the fox", "--chat", "--max-tokens", "8") == 0
    as_chat = capsys.readouterr().out
    assert generate(model, "the fox", "--max-tokens", "8") == 0
    assert capsys.readouterr().out != as_chat


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("args", "pattern"),
    [
        (("--regex", "[ab]{3}"), "[ab]{3}"),
        (("--choice", "yes", "--choice", "no"), "yes|no"),
        (("--json-schema", '{"enum": ["red", "blue"]}', "--jump-forward"), '"red"|"blue"'),
        (("--json-schema", "SCHEMA"), '"red"|"blue"'),
        (("--json-schema", "LENIENT", "--lenient"), '"red"|"blue"'),
        (("--grammar", "GRAMMAR"), "(xy)+"),
    ],
)
def test_output_follows_its_structure(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], pattern: str
) -> None:
    (tmp_path / "SCHEMA").write_text('{"enum": ["red", "blue"]}')
    (tmp_path / "LENIENT").write_text('{"enum": ["red", "blue"], "not": {"const": "green"}}')
    (tmp_path / "GRAMMAR").write_text('root ::= "xy"+')
    given = [str(tmp_path / each) if each.isupper() else each for each in args]
    assert main(["generate", "--model", str(model), "--threads", "1", "--max-tokens", "40", "the fox", *given]) == 0
    assert re.fullmatch(pattern, capsys.readouterr().out.removesuffix("\n").strip())


def test_structure_that_cannot_be_enforced_is_one_line(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for args, words in (
        (("--json-schema", '{"not": {}}'), "not at #/not"),
        (("--regex", "a", "--choice", "b"), "contradicts"),
        (("--lenient",), "--json-schema"),
        (("--grammar", "nowhere"), "nowhere"),
    ):
        assert main(["generate", "--model", str(model), "the fox", *args]) != 0
        [told] = capsys.readouterr().err.splitlines()
        assert words in told


@pytest.mark.full
def test_an_interrupt_ends_quietly(model: Path) -> None:
    command = [*OSTRO, "generate", "the fox", "--model", str(model), "--max-tokens", "200", "--ignore-eos"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    # It may have finished just before the signal.
    assert process.returncode in (0, 130)
    assert b"Traceback" not in stderr


@pytest.mark.full
def test_a_closed_pipe_ends_quietly(model: Path) -> None:
    command = [*OSTRO, "generate", "the fox", "--model", str(model), "--max-tokens", "200", "--ignore-eos"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        stderr = process.stderr.read()
    assert stderr == b""


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "Give a prompt, or a file of prompts"),
        (["a", "--prompts", "b"], "one of the two"),
        (["--prompts", "/nowhere/prompts.txt"], "Cannot read /nowhere/prompts.txt"),
        (["a", "--temperature", "3"], "temperature must be a number from 0 to 2"),
        (["a", "--max-tokens", "-1"], "max_tokens must be at least 0"),
        (["a", "--max-seq-len", "100000"], "max_seq_len"),
        (["a", "--kv-memory", "1"], "kv_memory must hold at least one page"),
        (["a", "--page-size", "0"], "page_size must be at least 1"),
        (["a", "--page-size", "100000000000"], "page_size must be at most 4096"),
        (["a", "--threads", "100000"], "threads must be at most 1024"),
        (["a", "--kv-memory", "900000G"], "kv_memory is"),
        (["a", "--output", "/"], "it is a directory"),
        (["the fox " * 200], "This model's maximum context length is 256 tokens"),
        (["a", "--output", "/nowhere/out.jsonl"], "Cannot write /nowhere/out.jsonl"),
        (["a", "--chat-template", "nonsense", "--chat"], "nonsense"),
    ],
)
def test_bad_usage_is_one_line_that_names_the_cure(
    model: Path, args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model", str(model), *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert line.startswith("ostro: ")
    assert message in line


def test_only_newlines_end_a_prompt(model: Path, tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_bytes("\ufeffone\x0ctwo\r\nthree\n".encode())
    assert generate(model, "--prompts", str(prompts), "--output", str(output), "--max-tokens", "1") == 0
    assert [json.loads(line)["prompt"] for line in output.read_text().splitlines()] == ["one\x0ctwo", "three"]


def test_output_follows_a_link_and_leaves_a_pipe_a_pipe(model: Path, tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target.jsonl", tmp_path / "link.jsonl", tmp_path / "pipe"
    target.write_text("old")
    link.symlink_to(target)
    assert generate(model, "the fox", "--output", str(link), "--max-tokens", "1") == 0
    assert link.is_symlink()
    assert json.loads(target.read_text())["prompt"] == "the fox"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True) as reader:
        assert generate(model, "the fox", "--output", str(pipe), "--max-tokens", "1") == 0
        assert reader.stdout is not None
        assert json.loads(reader.stdout.read())["prompt"] == "the fox"
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", 0),
        ("num_attention_heads", -4),
        ("hidden_size", -32),
        ("vocab_size", 10**13),
        ("vocab_size", 10**20),
        ("rms_norm_eps", 0),
        ("rope_theta", -1.0),
    ],
)
def test_a_senseless_config_is_one_line_that_names_the_key(
    key: str, value: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_model(tmp_path / "broken") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {key: value}))
    assert generate(config.parent, "the fox") == 1
    [line] = capsys.readouterr().err.splitlines()
    assert f"config.json: {key!r} must be" in line


def test_a_too_long_prompt_in_a_file_is_named_by_its_number(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("short\n" + "the fox " * 300 + "\n")
    assert generate(model, "--prompts", str(prompts), "--output", str(tmp_path / "out.jsonl")) == 2
    assert "Prompt 2: This model's maximum context length" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.txt"]


def test_a_tokenizer_that_is_missing_is_a_failure(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", str(model), "a", "--tokenizer", "/nowhere"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("ostro: ")
    assert "/nowhere" in line


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def with_header_size(size: int) -> "object":
    def damage(path: Path) -> None:
        path.write_bytes(struct.pack("<Q", size) + path.read_bytes()[8:])

    return damage


def as_html(path: Path) -> None:
    path.write_text("<html>404 not found</html>")


def with_quantization(path: Path) -> None:
    config = path.with_name("config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "hqq"}}))


def of_unknown_architecture(path: Path) -> None:
    config = path.with_name("config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["MysteryForCausalLM"]}))


def without_config(path: Path) -> None:
    path.with_name("config.json").unlink()


def without_tokenizer(path: Path) -> None:
    path.with_name("tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncated, "model.safetensors"),
        (with_header_size(2**62), "model.safetensors"),
        (as_html, "model.safetensors"),
        (with_quantization, "hqq"),
        (of_unknown_architecture, "MysteryForCausalLM is not supported; supported: Cohere2ForCausalLM"),
        (without_config, "config.json"),
        (without_tokenizer, "tokenizer.json"),
    ],
)
def test_a_damaged_model_is_one_line_that_names_the_file(
    damage: "object", message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = write_model(tmp_path / "broken")
    damage(broken / "model.safetensors")  # type: ignore[operator]
    assert generate(broken, "the fox") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert message in line


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model", b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60)])
def test_a_damaged_gguf_is_one_line_that_names_the_file(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(content)
    assert generate(broken, "the fox") == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "broken.gguf" in line


def test_help_starts_without_loading_anything_heavy() -> None:
    code = """
import atexit, sys
atexit.register(lambda: print(sorted(sys.modules)))
sys.argv[1:] = ["--help"]
import ostro.__main__
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1]
    for module in ("torch", "numpy", "tokenizers", "jinja2", "pydantic", "tqdm"):
        assert f"'{module}'" not in loaded


def test_version_is_printed() -> None:
    done = subprocess.run([*OSTRO, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ostro 0.")
