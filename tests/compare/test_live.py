"""The whole command against real servers and models: Ostro by each dialect, and in process."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, live_server
from model_directory import write_model
from stub_server import Asked, Reply, stub_server, tgi

from ostro import LLM, SamplingParams
from ostro.cli import main
from ostro.config import EngineConfig

TEXTS = ["the quick brown fox", "über <b>die</b> Brücke", "yes, no", "the lazy dog and the dog"]
MESSAGES = [{"role": "system", "content": "yes"}, {"role": "user", "content": "the fox"}]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = tmp_path_factory.mktemp("server")
    with live_server(directory, str(model), "--api-key", "sk-compare", faults="") as server:
        yield server


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTRO_COMPARE_KEY_A", "sk-compare")
    monkeypatch.setenv("OSTRO_COMPARE_KEY_B", "sk-compare")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n\n".join(TEXTS))
    return path


def compare(a: str, b: str, prompts: Path, *args: str) -> tuple[int, Any]:
    """The exit status, and what --json says."""
    output = prompts.with_name("out.json")
    files = ["--prompts", str(prompts), "--json", str(output)]
    status = main(["compare", "--a", a, "--b", b, *files, "--max-tokens", str(NUM_TOKENS), *args])
    return status, json.loads(output.read_text()) if output.exists() else None


def texts(found: Any, side: str) -> list[str]:
    return [row[side]["text"] for row in found["rows"]]


@pytest.mark.full
@pytest.mark.parametrize("dialect", ["", "ostro+"])
def test_a_server_agrees_with_its_model_in_process(
    server: LiveServer, model: Path, prompts: Path, dialect: str
) -> None:
    status, found = compare(dialect + server.url, f"offline:{model}", prompts, "--concurrency", "3")
    assert status == 0
    assert found["agreement"]["exact"] == len(TEXTS)
    completions = LLM(model, EngineConfig(threads=1)).generate(
        TEXTS, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    )
    assert texts(found, "a") == texts(found, "b") == [each.text for each in completions]
    for side in "ab":
        assert found[side]["answered"] == len(TEXTS)
        assert found[side]["num_tokens"] == sum(each.num_generated for each in completions)
        assert 0 < found[side]["ttft"]["p50"] <= found[side]["latency"]["p50"]
        assert all(row[side]["arrivals"] == sorted(row[side]["arrivals"]) for row in found["rows"])


@pytest.mark.full
@pytest.mark.parametrize("chat", [[], ["--chat"]])
def test_tokens_and_log_probabilities_agree(
    server: LiveServer, model: Path, prompts: Path, chat: Sequence[str]
) -> None:
    status, found = compare(server.url + "/v1", str(model), prompts, "--logprobs", *chat)
    assert status == 0
    agreement = found["agreement"]
    assert (agreement["exact_share"], agreement["prefix_share"]) == (1.0, 1.0)
    assert agreement["divergence"]["num_tokens"] == found["a"]["num_tokens"] == found["b"]["num_tokens"]
    assert agreement["divergence"]["max"] < 1e-4
    assert all(row["agreement"]["prefix_tokens"] == row["b"]["num_tokens"] for row in found["rows"])


def test_the_same_seed_gives_the_same_samples(server: LiveServer, model: Path, prompts: Path) -> None:
    sampled = ["--temperature", "0.9", "--top-p", "0.95", "--seed", "7"]
    status, found = compare(server.url, f"offline:{model}", prompts, *sampled)
    assert (status, found["agreement"]["exact_share"]) == (0, 1.0)
    assert found["settings"] | {"temperature": 0.9, "top_p": 0.95, "seed": 7} == found["settings"]
    _, other = compare(server.url, f"offline:{model}", prompts, *sampled[:-1], "8")
    assert texts(other, "a") != texts(found, "a")


@pytest.mark.full
def test_a_file_of_json_lines_mixes_texts_and_conversations(server: LiveServer, model: Path, tmp_path: Path) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("\n".join(json.dumps(each) for each in ({"prompt": "the fox\nthe dog"}, {"messages": MESSAGES})))
    status, found = compare(server.url, f"offline:{model}", lines)
    assert (status, found["agreement"]["exact"]) == (0, 2)
    llm = LLM(model, EngineConfig(threads=1))
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    expected = [llm.generate("the fox\nthe dog", params)[0], llm.chat(MESSAGES, params)]
    assert texts(found, "a") == [each.text for each in expected]
    assert found["rows"][1]["messages"] == MESSAGES


@pytest.mark.full
def test_a_stop_ends_both_sides_alike(server: LiveServer, model: Path, prompts: Path) -> None:
    _, free = compare(server.url, f"offline:{model}", prompts)
    stop = texts(free, "a")[0][3:5]
    status, found = compare(f"ostro+{server.url}", f"offline:{model}", prompts, "--stop", stop)
    assert (status, found["agreement"]["exact_share"]) == (0, 1.0)
    assert stop not in texts(found, "a")[0]
    assert found["rows"][0]["a"]["finish_reason"] == found["rows"][0]["b"]["finish_reason"] == "stop"


def test_a_prompt_that_cannot_run_is_a_row_with_its_error(server: LiveServer, model: Path, prompts: Path) -> None:
    prompts.write_text("the fox\n" + "dog " * 600)
    status, found = compare(server.url, f"offline:{model}", prompts)
    assert status == 0
    assert "maximum context length" in found["rows"][1]["a"]["error"]
    assert "maximum context length" in found["rows"][1]["b"]["error"]
    assert (found["agreement"]["compared"], found["agreement"]["exact_share"]) == (1, 0.5)


def test_tgi_and_ostro_are_compared_in_their_own_tongues(
    server: LiveServer, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    with stub_server(tgi([(1, "<script>x</script>"), (2, " y")])) as stub:
        status, found = compare(f"tgi+{stub.url}", server.url, prompts, "--logprobs", "--report", str(page))
    assert status == 0
    assert (found["a"]["model"], found["b"]["model"]) == ("org/tiny", "tiny")
    assert found["agreement"]["exact"] == 0
    assert found["a"]["num_tokens"] == 2 * len(TEXTS)
    assert "&lt;script&gt;x" in page.read_text()
    assert "<script" not in page.read_text()
    assert "sk-compare" not in page.read_text() + json.dumps(found)
    shown = capsys.readouterr()
    assert "0 of 4 outputs are the same" in shown.out
    assert shown.err == ""


# --- exit statuses --------------------------------------------------------------------------------------------------


def broken(asked: Asked) -> Reply:
    return Reply(
        {"data": [{"id": "m"}]} if asked.path == "/v1/models" else {"error": "broken"},
        status=200 if asked.body is None else 500,
    )


def test_a_side_that_never_answers_is_status_1_and_still_reported(
    server: LiveServer, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stub_server(broken) as stub:
        status, found = compare(server.url, stub.url, prompts)
    assert status == 1
    assert (found["a"]["answered"], found["b"]["failed"]) == (len(TEXTS), len(TEXTS))
    assert found["rows"][0]["b"]["error"] == "HTTP 500: broken"
    assert "B never answered" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_status_1_at_once(
    server: LiveServer, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stub_server(broken) as stub:
        pass
    assert compare(server.url, stub.url, prompts) == (1, None)
    assert "ostro: B: " in capsys.readouterr().err


@pytest.mark.parametrize(("share", "expected"), [("0", 0), ("0.75", 0), ("0.76", 1)])
def test_agreement_may_be_demanded(prompts: Path, share: str, expected: int) -> None:
    def answer(name: str) -> Any:
        def reply(asked: Asked) -> Reply:
            text = name if asked.body["prompt"] == TEXTS[0] else "same"
            done = {"choices": [{"text": text, "finish_reason": "stop"}]}
            return Reply(events=[b"data: " + json.dumps(done).encode() + b"\n\n"])

        return reply

    with stub_server(answer("a")) as a, stub_server(answer("b")) as b:
        models = ["--model-a", "x", "--model-b", "y"]
        status, found = compare(a.url, b.url, prompts, *models, "--fail-under", share, "--warmup", "3")
        assert len(a.asked) == len(TEXTS) + 3
    assert (status, found["agreement"]["exact_share"]) == (expected, 0.75)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "0"], "top_p"),
        (["--concurrency", "0"], "--concurrency"),
        (["--warmup", "-1"], "--warmup"),
        (["--timeout", "0"], "--timeout"),
        (["--fail-under", "90"], "--fail-under"),
        (["--chat"], "B: TGI's /generate takes no messages"),
        (["--seed", "-1"], "B: TGI's seeds start at 1"),
        (["--model-b", "x"], "takes no name"),
        (["--prompts", "missing.txt"], "Cannot read missing.txt"),
    ],
)
def test_wrong_options_are_status_2_before_anything_runs(
    prompts: Path, capsys: pytest.CaptureFixture[str], args: list[str], told: str
) -> None:
    with stub_server(broken) as stub:
        status, found = compare(stub.url, f"tgi+{stub.url}", prompts, *args)
        assert (status, found, stub.asked) == (2, None, [])
    shown = capsys.readouterr()
    assert told in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"prompt": 1}', '{"messages": []}', '{"messages": ["x"]}', '{"prompt": "a", "messages": []}']
)
def test_a_line_that_is_not_a_prompt_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "fine"}\n' + line)
    assert compare("http://127.0.0.1:9", "http://127.0.0.1:9", lines) == (2, None)
    assert "line 2" in capsys.readouterr().err


def test_missing_options_are_argparses_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["compare", "--a", "http://127.0.0.1:9"])
    assert exit.value.code == 2
    assert "--b" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_to_costs_no_work(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stub_server(broken) as stub:
        status, _ = compare(stub.url, stub.url, prompts, "--report", str(prompts.parent / "no" / "report.html"))
        assert (status, stub.asked) == (2, [])
    assert "Cannot write" in capsys.readouterr().err


@pytest.mark.full
def test_an_interrupt_does_not_wait_for_a_silent_server(prompts: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-m", "ostro", "compare", "--a", url, "--b", url, "--prompts", str(prompts)]
        with subprocess.Popen(
            [*command, "--model-a", "m", "--model-b", "m"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            connection, _ = silent.accept()
            with connection:
                connection.recv(1)
                process.send_signal(signal.SIGINT)
                _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, b"")
