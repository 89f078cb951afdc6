"""The whole command: a table is measured on a tiny model, and simulated."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from model_directory import write_model
from simulated import COPIES, cost_table

from ostro.cli import main
from ostro.simulation.costs import CopyTimes


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    path.write_bytes(msgspec.json.encode(cost_table()))
    return path


def test_a_load_gives_a_table_a_file_and_a_page(
    costs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--output-file", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.html")]
    options = ["--concurrency", "1,4", "--requests", "12", "--input-len", "8-16", "--output-len", "3-9"]
    assert (
        main(
            [
                "simulate",
                "--costs",
                str(costs),
                "--replicas",
                "2",
                "--slo",
                "ttft=1s",
                "--cost-per-hour",
                "2",
                *options,
                *files,
            ]
        )
        == 0
    )
    table = capsys.readouterr().out
    for row in (
        "simulation, 2 x cpu",
        "output tokens/s",
        "TTFT p50",
        "within the SLO",
        "KV cache",
        "replicas used",
        "cost/1M output",
    ):
        assert row in table
    found = json.loads((tmp_path / "r.json").read_text())
    assert [level["figures"]["succeeded"] for level in found["levels"]] == [12, 12]
    # Of both replicas.
    assert [level["figures"]["cost"]["per_hour"] for level in found["levels"]] == [4.0, 4.0]
    assert "<svg" in (tmp_path / "r.html").read_text()


def test_a_trace_is_replayed(costs: Path, tmp_path: Path) -> None:
    trace, output = tmp_path / "trace.jsonl", tmp_path / "r.json"
    rows = [{"timestamp": 3.0, "input_len": 9, "output_len": 3}, {"timestamp": 3.5, "prompt": "no", "output_len": 2}]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["simulate", "--costs", str(costs), "--trace", str(trace), "--output-file", str(output)]) == 0
    requests = json.loads(output.read_text())["levels"][0]["requests"]
    assert [(each["start"], each["output_tokens"]) for each in requests] == [(0.0, 3), (0.5, 2)]


def test_a_trace_of_conversations_is_replayed_turn_by_turn(costs: Path, tmp_path: Path) -> None:
    trace, output = tmp_path / "trace.jsonl", tmp_path / "r.json"
    rows = [
        {"timestamp": 10.0 * turn + talk, "conversation": f"talk {talk}", "input_len": 20, "output_len": 6}
        for talk in range(2)
        for turn in range(3)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["simulate", "--costs", str(costs), "--trace", str(trace), "--output-file", str(output)]) == 0
    requests = json.loads(output.read_text())["levels"][0]["requests"]
    # Four tokens before all messages, and two after each.
    assert [each["input_tokens"] for each in requests] == [26, 26, 56, 56, 86, 86]
    # With the answers, but for their last token and what follows it.
    assert [each["cached_tokens"] for each in requests[2:]] == [28, 28, 60, 60]


def test_a_conversation_needs_lengths_and_the_chat_endpoint(
    costs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    for row, endpoint in (({"prompt": "no"}, "chat"), ({"input_len": 3}, "completions")):
        trace.write_text(json.dumps(row | {"timestamp": 0, "conversation": 1}) + "\n")
        assert main(["simulate", "--costs", str(costs), "--trace", str(trace), "--endpoint", endpoint]) == 2
        assert 'line 1: a "conversation" has an "input_len"' in capsys.readouterr().err


@pytest.mark.full
def test_the_same_load_gives_the_same_run_in_another_process(costs: Path, tmp_path: Path) -> None:
    """The router once went through its candidates in the order of a set of names, which differs by process."""
    command = [sys.executable, "-m", "ostro", "simulate", "--costs", str(costs), "--replicas", "8"]
    load = ["--rate", "200", "--requests", "150", "--shared-prefix", "32", "--input-len", "8-40"]
    found = []
    for seed in ("1", "2"):
        output = tmp_path / f"{seed}.json"
        env = os.environ | {"PYTHONHASHSEED": seed}
        subprocess.run([*command, *load, "--output-file", str(output)], check=True, env=env, capture_output=True)
        found.append(json.loads(output.read_text())["levels"][0]["requests"])
    assert found[0] == found[1]


def test_smaller_engines_than_were_measured(costs: Path, tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    load = [
        "--rate",
        "300",
        "--requests",
        "60",
        "--input-len",
        "20",
        "--output-len",
        "20",
        "--output-file",
        str(output),
    ]
    preempted = []
    for options in ([], ["--num-pages", "24"]):
        assert main(["simulate", "--costs", str(costs), *load, *options]) == 0
        preempted.append(json.loads(output.read_text())["levels"][0]["fleet"]["preemptions"])
    assert preempted[0] == 0 < preempted[1]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--replicas", "0"], "--replicas"),
        (["--replicas", "100001"], "--replicas must be at most 100000, got 100001."),
        (["--num-pages", "0"], "--num-pages must be from 1 to 67108864, and is 0."),
        (["--num-pages", "1000000000000"], "--num-pages must be from 1 to"),
        (["--max-batch-tokens", "1000000000000"], "--max-batch-tokens must be from 1 to"),
        (["--max-batch-seqs", "1000000000000"], "--max-batch-seqs must be from 1 to"),
        (["--kv-host-memory", "1000"], "--kv-host-memory must have room"),
        (["--kv-disk-size", "100000G", "--kv-host-memory", "1M"], "--kv-disk-size must have room"),
        (["--kv-disk-size", "1M", "--no-prefix-caching"], "--kv-disk-size keeps cached prefixes"),
        (["--cost-per-hour", "0"], "--cost-per-hour"),
        (["--rate", "x"], "--rate"),
        (["--slo", "speed=1s"], "--slo"),
        (["--model", "x"], "--model is for --measure"),
        (["--costs", "/nowhere.json"], "Cannot read /nowhere.json"),
    ],
)
def test_invalid_options_are_refused(
    costs: Path, args: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--costs", str(costs), *args]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("copies", "flag"),
    [
        (None, "--kv-host-memory"),
        (None, "--kv-disk-size"),
        (msgspec.structs.replace(COPIES, host=None), "--kv-host-memory"),
        (msgspec.structs.replace(COPIES, disk=None), "--kv-disk-size"),
    ],
)
def test_tiers_that_were_not_measured_are_refused_by_name(
    copies: CopyTimes | None, flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(cost_table(), copies=copies)))
    assert main(["simulate", "--costs", str(path), flag, "1M"]) == 2
    assert f"{flag} needs to know how long copies of pages take" in capsys.readouterr().err


def test_tiers_below_the_kv_cache_find_what_it_has_evicted(
    costs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, output, found = tmp_path / "prompts.txt", tmp_path / "r.json", []
    prompts.write_text("".join(" ".join(f"{name}{word}" for word in range(60)) + "\n" for name in "abcd"))
    load = ["--prompts", str(prompts), "--requests", "16", "--output-file", str(output), "--num-pages", "40"]
    for tiers in ([], ["--kv-host-memory", "64K"], ["--kv-host-memory", "20K", "--kv-disk-size", "1M"]):
        assert main(["simulate", "--costs", str(costs), *load, "--output-len", "1", *tiers]) == 0
        found.append(json.loads(output.read_text())["levels"][0]["fleet"])
    without, host, both = found
    assert without["pages_stored"] == without["pages_fetched_host"] == 0
    assert host["pages_fetched_host"] > 0
    assert both["pages_fetched_disk"] > 0
    assert min(host["hit_tokens"], both["hit_tokens"]) > without["hit_tokens"]
    assert "to host memory" in capsys.readouterr().out


def test_no_load_can_be_chosen_to_measure_by(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--measure", str(tmp_path / "c.json"), "--rate", "3", "--replicas", "2"]) == 2
    told = capsys.readouterr().err
    assert "--replicas" in told
    assert "--rate" in told
    assert not (tmp_path / "c.json").exists()


@pytest.mark.full
def test_what_is_measured_can_be_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, costs = write_model(tmp_path / "tiny", context=4096), tmp_path / "costs.json"
    assert main(["simulate", "--measure", str(costs), "--model", str(model)]) == 0
    table = json.loads(costs.read_text())
    assert table["engine"]["max_seq_len"] == 4096
    copies = table["copies"]
    assert copies["page_bytes"] > 0
    # The native core's pages are in host memory already.
    assert copies["host"] is None
    assert min(copies["disk"]["write"], copies["disk"]["read"], copies["disk"]["waiting"]) > 0
    assert set(table["endpoints"]) == {"chat", "completions"}
    # Its tokenizer takes text nearly letter by letter.
    assert all(each["tokens_per_word"] > 2 for each in table["endpoints"].values())
    capsys.readouterr()
    assert main(["simulate", "--costs", str(costs), "--rate", "5", "--requests", "10"]) == 0
    assert "succeeded" in capsys.readouterr().out
