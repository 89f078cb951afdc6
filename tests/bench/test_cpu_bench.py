"""The benchmark against llama.cpp, but for llama.cpp: what it prints is in samples, and its programs are scripts."""

import math
import os
import socket
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader, dequantize
from model_directory import write_model

from cpu_peers import ostro_worker, transformers_worker
from cpu_peers.llama_cpp import PROGRAMS, LlamaCpp, Speed, parse_perplexity, parse_speeds
from cpu_peers.model_files import ModelFiles, tensor_types
from cpu_peers.parts import PARTS, Setup, speed_rows
from cpu_peers.random_llama import KINDS, SHAPES, Shape, bytes_per_token, tensor_dims, tensor_type, write_random_llama
from cpu_peers.servers import free_port, load, read_load, running
from cpu_peers.verdicts import Bar, Row, table, with_spread
from ostro import LLM, SamplingParams
from ostro.config import EngineConfig

# Of llama.cpp 0.5.0-dev, commit 0c1e570.
BATCHED_BENCH = """\
load_backend: loaded CPU backend
{"n_kv_max": 512, "n_batch": 2048, "n_ubatch": 512, "flash_attn": -1, "is_pp_shared": 0, "n_gpu_layers": -1, \
"n_threads": 2, "n_threads_batch": 2, "pp": 16, "tg": 8, "pl": 1, "n_kv": 24, "t_pp": 0.037364, "speed_pp": \
428.219696, "t_tg": 0.047264, "speed_tg": 169.262024, "t": 0.084628, "speed": 283.594086}
{"n_kv_max": 512, "n_batch": 2048, "n_ubatch": 512, "flash_attn": -1, "is_pp_shared": 0, "n_gpu_layers": -1, \
"n_threads": 2, "n_threads_batch": 2, "pp": 16, "tg": 8, "pl": 2, "n_kv": 48, "t_pp": 0.074579, "speed_pp": \
429.075195, "t_tg": 1.242448, "speed_tg": 12.877803, "t": 1.317027, "speed": 36.445724}

"""
PERPLEXITY = """\
0.00.687.181 I perplexity: calculating perplexity over 2 chunks, n_ctx=512, batch_size=2048, n_seq=4
0.16.928.770 I perplexity: 16.24 seconds per pass - ETA 0.13 minutes
[1]15.8667,[2]19.9008,

0.17.129.274 I Final estimate: PPL = 19.9008 +/- 2.26396
"""
# Answers as llama.cpp's programs would, with speeds that tell its calls apart.
SCRIPT = """\
#!{python}
import json, sys
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if sys.argv[0].endswith("quantize"):
    open(sys.argv[3], "w").write(sys.argv[4])
elif sys.argv[0].endswith("perplexity"):
    sys.exit("no memory")
else:
    for call, streams in enumerate(arguments["-npl"].split(",")):
        print(json.dumps({{"pl": int(streams), "speed_pp": 100.0 + call, "speed_tg": float(arguments["-c"])}}))
"""


SMALL = Shape(
    hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, inner=64, vocab_size=300, context=512, deviation=0.4
)


@pytest.fixture
def programs(tmp_path: Path) -> LlamaCpp:
    for name in PROGRAMS:
        program = tmp_path / name
        program.write_text(SCRIPT.format(python=sys.executable))
        program.chmod(0o755)
    return LlamaCpp(tmp_path, threads=2)


@pytest.fixture(scope="module")
def random_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "random.gguf"
    write_random_llama(path, SMALL, "f16")
    return path


@pytest.fixture(scope="module")
def llm(random_llama: Path) -> LLM:
    return LLM(config=EngineConfig(model=str(random_llama), device="cpu", backend="torch", kv_memory=8 << 20))


# --- what llama.cpp says --------------------------------------------------------------------------------------------


def test_speeds_are_read_from_among_other_lines() -> None:
    assert parse_speeds(BATCHED_BENCH) == [Speed(1, 428.219696, 169.262024), Speed(2, 429.075195, 12.877803)]


def test_perplexity_is_the_final_estimate() -> None:
    assert parse_perplexity(PERPLEXITY) == 19.9008
    with pytest.raises(RuntimeError, match="told no estimate"):
        parse_perplexity("you need at least 1024 tokens")


def test_first_measurement_warms_up_and_the_context_holds_all_streams(programs: LlamaCpp) -> None:
    found = programs.speeds(Path("model.gguf"), [1, 8, 32], 128, 128)
    assert found == [Speed(1, 101.0, 8192.0), Speed(8, 102.0, 8192.0), Speed(32, 103.0, 8192.0)]


def test_program_that_fails_is_quoted(programs: LlamaCpp) -> None:
    with pytest.raises(RuntimeError, match="llama-perplexity ended with status 1: no memory"):
        programs.perplexity(Path("model.gguf"), Path("text.txt"), 512)


def test_missing_programs_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"lacks llama-batched-bench, .*build_llama_cpp\.sh"):
        LlamaCpp(tmp_path, threads=2).check()


# --- arithmetic and table -------------------------------------------------------------------------------------------


def test_bar_is_held_against_the_ratio_of_medians() -> None:
    row = Row("q4_0", "tokens/s", [110, 150, 120], "llama.cpp", [100, 10, 105], Bar("ratio", least=1.2))
    assert row.ratio == pytest.approx(1.2)
    assert row.met is True
    assert Row("q4_0", "tokens/s", [119], "llama.cpp", [100], Bar("ratio", least=1.2)).met is False


def test_bar_may_be_of_the_value_or_of_what_is_beyond_the_peers() -> None:
    assert Row("start", "s", [1.5, 2.5, 1.9], "llama-server", [0.8], Bar("value", most=2.0)).met is True
    memory = Row("memory", "MiB", [600], "llama-server", [300], Bar("excess", most=250.0))
    assert (memory.judged, memory.met) == (300, False)
    assert Row("f32", "", [20.0], "llama.cpp", [20.1], Bar("ratio", least=0.999, most=1.001)).met is False


def test_bar_without_its_peer_is_not_judged() -> None:
    row = Row("q4_0", "tokens/s", [100], "llama.cpp", [], Bar("ratio", least=1.1))
    assert row.met is None
    assert table([row]).endswith("0 of 1 bars met, 1 not judged")


def test_spread_is_half_of_the_range() -> None:
    assert with_spread([95, 100, 105]) == "100 ±5%"
    assert with_spread([19.6254]) == "19.63"
    assert with_spread([]) == "–"


def test_table_has_a_line_for_each_row_and_counts_bars() -> None:
    rows = [
        Row("q4_0, 1 stream: decode", "tokens/s", [180, 190], "llama.cpp", [160, 164], Bar("ratio", least=1.1)),
        Row("q4_0: memory", "MiB", [600], "llama-server", [300], Bar("excess", most=250)),
        Row("default: decode", "tokens/s", [100], "transformers", [20]),
    ]
    head, first, second, third, count = table(rows).splitlines()
    assert head.split() == ["Ostro", "peer", "Ostro", "/", "peer", "bar", "met"]
    assert first.split("  ")[0] == "q4_0, 1 stream: decode (tokens/s)"
    assert first.split()[-5:] == ["llama.cpp", "1.142×", "≥", "1.1×", "yes"]
    assert second.split()[-5:] == ["2.000×", "≤", "+250", "MiB", "NO"]
    assert third.endswith("5.000×")
    assert count == "1 of 2 bars met"


def test_runs_become_a_row_for_each_number_of_streams_and_phase() -> None:
    ours = [[Speed(1, 500, 100), Speed(8, 600, 400)], [Speed(1, 510, 120), Speed(8, 620, 420)]]
    theirs = [[Speed(1, 400, 90), Speed(8, 400, 300)], [Speed(1, 410, 91), Speed(8, 410, 310)]]
    rows = list(speed_rows("q8_0", "llama.cpp", ours, theirs, {8: 1.2}, 1.5))
    assert [row.name for row in rows] == [
        "q8_0, 1 stream: decode",
        "q8_0, 1 stream: prefill",
        "q8_0, 8 streams: decode",
        "q8_0, 8 streams: prefill",
    ]
    assert [row.bar for row in rows] == [
        None,
        Bar("ratio", least=1.5),
        Bar("ratio", least=1.2),
        Bar("ratio", least=1.5),
    ]
    assert list(rows[2].ostro) == [400, 420]
    assert list(rows[2].theirs) == [300, 310]


def test_load_that_compares_nothing_is_refused() -> None:
    figures = {"failed": 0, "errors": {}, "ended_early": 3, "counted_by_events": 0, "output_tokens_per_second": 10.0}
    with pytest.raises(RuntimeError, match="3 answers ended early"):
        read_load({"levels": [{"figures": figures}]})
    assert read_load({"levels": [{"figures": {**figures, "ended_early": 0}}]})["output_tokens_per_second"] == 10.0


# --- files and engines ----------------------------------------------------------------------------------------------


def test_files_are_made_once(programs: LlamaCpp, tmp_path: Path) -> None:
    files = ModelFiles(tmp_path / "work", programs)
    source = tmp_path / "source.gguf"
    source.write_bytes(b"")
    made = files.made(source, "model.q4_0.gguf", "Q4_0")
    assert made.read_text() == "Q4_0"
    made.write_text("kept")
    assert files.made(source, "model.q4_0.gguf", "Q4_0").read_text() == "kept"


def test_engine_generates_as_many_tokens_as_are_timed(llm: LLM) -> None:
    counters = llm.core.scheduler.counters
    before = counters.generated_tokens
    found = ostro_worker.speeds(llm, {"streams": [1, 3], "input": 20, "output": 5, "seed": 0})["speeds"]
    assert isinstance(found, list)
    assert [speed["streams"] for speed in found] == [1, 3]
    assert all(speed["prefill"] > 0 and speed["decode"] > 0 for speed in found)
    # For each stream: a token of two prefills, the first of two decodes, the warm-up's and the ones timed.
    assert counters.generated_tokens - before == 4 * (4 + ostro_worker.WARMUP_TOKENS + 5)
    assert not llm.core.has_work
    llm.core.check_integrity()


def test_perplexity_is_of_the_second_halves_but_for_their_first_token(
    llm: LLM, random_llama: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat with a thin cloth then went home to think of other things\n")
    found = ostro_worker.perplexity(llm, {"text": str(text), "context": 16})
    ids = found["ids"]
    assert isinstance(ids, list)
    assert ids == llm.tokenizer.encode(text.read_text().removesuffix("\n"))
    model = transformers_worker.load(str(random_llama))
    losses = []
    for at in range(0, len(ids) // 16 * 16, 16):
        window = torch.tensor(ids[at : at + 16])
        with torch.inference_mode():
            predicted = model(window[None]).logits[0].log_softmax(-1)
        losses += [-predicted[place - 1, window[place]].item() for place in range(9, 16)]
    assert found["scored"] == len(losses) > 14
    assert found["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)


def test_random_llama_has_the_tensors_of_its_shape(random_llama: Path) -> None:
    assert tensor_types(random_llama) == {"F16": 1 + 2 * 7, "F32": 1 + 2 * 2}


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_quantised_random_llama_has_the_weights_that_are_asked_for(kind: str, tmp_path: Path) -> None:
    shape = Shape(hidden=256, layers=8, heads=4, kv_heads=2, head_dim=64, inner=512, vocab_size=300, deviation=0.05)
    write_random_llama(path := tmp_path / "model.gguf", shape, kind)
    tensors = GGUFReader(path).tensors
    for tensor in tensors:
        weights = dequantize(tensor.data, tensor.tensor_type)
        if weights.ndim > 1:
            assert abs(weights.mean()) < 0.003, tensor.name
            assert weights.std() == pytest.approx(0.05, rel=0.05), tensor.name
    assert bytes_per_token(shape, kind) == sum(tensor.n_bytes for tensor in tensors)
    assert len({tensor.data.tobytes() for tensor in tensors if tensor.data.ndim > 1}) == 1 + 8 * 7


@pytest.mark.full
def test_a_random_gpt_oss_has_its_familys_tensors(tmp_path: Path) -> None:
    """Biases that are all alike would send all tokens to the same experts."""
    shape = replace(SHAPES["gpt-oss"], hidden=128, layers=1, heads=4, kv_heads=2, inner=96, experts=4, vocab_size=300)
    write_random_llama(path := tmp_path / "model.gguf", shape, "mxfp4")
    llm = LLM(config=EngineConfig(model=str(path), device="cpu", threads=1))
    assert "MXFP4" in ostro_worker.describe(llm)
    for tensor in GGUFReader(path).tensors:
        weights = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith("norm.weight"):
            assert (weights == 1).all()
        else:
            assert 0 < weights.std() < 0.05, tensor.name


def test_types_of_a_random_llama_are_those_that_llama_cpps_quantiser_chooses() -> None:
    def types(part: str, kind: str) -> dict[str, int]:
        shape, found = SHAPES[part], Counter[str]()
        for name, dims in tensor_dims(shape).items():
            found[tensor_type(name, dims, shape, kind).name] += 1
        return dict(found)

    # SmolLM2's 135M and a Llama 3.2 of 3B, as the quantiser made them.
    assert types("135m", "q4_0") == {"F32": 61, "Q4_0": 210, "Q8_0": 1}
    assert types("135m", "q4_k_m") == {"F32": 61, "Q5_0": 166, "Q8_0": 15, "Q4_K": 16, "Q6_K": 14}
    assert types("3b", "q4_k_m") == {"F32": 57, "Q4_K": 168, "Q6_K": 29}
    assert types("3b", "q8_0") == {"F32": 57, "Q8_0": 197}


def test_a_token_reads_only_the_experts_it_goes_through() -> None:
    few, all_ = SHAPES["moe"], replace(SHAPES["moe"], chosen=32)
    experts = 24 * 32 * 3 * 1024 * 512 * 18 // 32
    assert bytes_per_token(all_, "q4_0") - bytes_per_token(few, "q4_0") == experts * 24 // 32


def test_quantised_random_llama_generates(tmp_path: Path) -> None:
    shape = Shape(hidden=256, layers=2, heads=4, kv_heads=2, head_dim=64, inner=512, vocab_size=300, context=512)
    write_random_llama(path := tmp_path / "model.gguf", shape, "q4_k_m")
    llm = LLM(config=EngineConfig(model=str(path), device="cpu", kv_memory=8 << 20))
    [completion] = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    assert completion.num_generated == 4


def test_engines_take_turns_and_turns_in_being_first(programs: LlamaCpp, tmp_path: Path) -> None:
    order: list[str] = []

    def turn(who: str, run: int) -> int:
        order.append(f"{who} {run}")
        return run

    found = setup(programs, tmp_path).by_turns(partial(turn, "ours"), partial(turn, "theirs"))
    assert found == ([0, 1, 2], [0, 1, 2])
    assert order == ["ours 0", "theirs 0", "theirs 1", "ours 1", "ours 2", "theirs 2"]


def setup(llama: LlamaCpp, directory: Path) -> Setup:
    return Setup(
        llama=llama,
        files=ModelFiles(directory / "work", llama),
        threads=1,
        backend="auto",
        variants=["default"],
        runs=3,
        streams=[1],
        input=8,
        output=4,
        transformers=False,
        waves=1,
        load_rate=1.0,
        load_seconds=1.0,
        load_input=8,
        load_output=4,
        text=directory / "text.txt",
        context=16,
    )


# --- servers --------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_server_is_timed_loaded_weighed_and_ended(tmp_path: Path) -> None:
    model, port = write_model(tmp_path / "model"), free_port()
    command = [sys.executable, "-m", "ostro", "serve", str(model), "--port", str(port), "--kv-memory", "8M"]
    with running(command, port) as served:
        assert 0 < served.first_token() < 300
        body = {"prompt": "the dog", "max_tokens": 2, "ignore_eos": True}
        assert served.ask("/v1/completions", body)["usage"]["completion_tokens"] == 2
        memory = served.memory()
        # The engine, a process of its own, counts.
        assert 50 << 20 < memory.proportional <= memory.resident
        figures = load(served, ["--concurrency", "2", "--requests", "4", "--input-len", "8", "--output-len", "4"])
        assert (figures["succeeded"], figures["output_tokens"]) == (4, 16)
    assert served.process.returncode is not None
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_server_that_ends_at_once_is_quoted() -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with running(command, port := free_port()) as served, pytest.raises(RuntimeError, match="no such model"):
        served.first_token()
    assert port == served.port


def test_parts_are_those_of_the_documentation() -> None:
    program = (Path(__file__).parents[2] / "bench" / "cpu.py").read_text(encoding="utf-8")
    for part in PARTS:
        assert f"\n    {part}  " in program, part
    assert os.access(Path(__file__).parents[2] / "bench" / "build_llama_cpp.sh", os.X_OK)
