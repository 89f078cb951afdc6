"""Kernels that other processes compile ahead: for Hopper, without a GPU. What Triton would do with them on one is asked
of Triton itself, in a process of its own (`precompile_probe`): in the tests' process, its interpreter has replaced its
compiler.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from every_family import TINY, some
from model_directory import write_model
from native_models import ModelCheckpoint, savable_model
from quantized_packers import FORMATS, write_quantized

from ostro.backends.backend import OpenedModel
from ostro.backends.cuda.choices import Choices, Gpu, written
from ostro.backends.cuda.precompiling import Compiled, Precompiler, Request, mark, precompiler
from ostro.backends.cuda.shipped_binaries import pack
from ostro.backends.loading import load_runner
from ostro.config import EngineConfig
from ostro.devices import DEVICE_KINDS
from ostro.kernels.gpu.tilings import Matmul, Multiprocessors, SliceTiling
from ostro.models.description import Causal
from ostro.weights import open_checkpoint

CONFIGS = Path(__file__).parents[2] / "bench" / "configs"
PROBE = Path(__file__).parents[1] / "support" / "precompile_probe.py"
H200 = Gpu("NVIDIA H200", "9.0", Multiprocessors(132, 220 << 10))

# The probe's other tests are of this one.
FIRST, LIBRARY = "qwen3", "library between slices"
QUANTIZED = {**TINY["llama"], "hidden_size": 64, "intermediate_size": 64, "head_dim": 32}


def config(name: str, layers: int = 2) -> dict[str, object]:
    return {**json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8")), "num_hidden_layers": layers}


def request(model: dict[str, object], settings: EngineConfig | None = None) -> Request:
    return Request(model, DEVICE_KINDS["cuda"].resolve(settings or EngineConfig(max_seq_len=4096)), H200)


REQUESTS: Mapping[str, Request] = {
    FIRST: request(config("qwen3-0.6b")),
    # Layers with windows and without, norms of what is added.
    "gemma3": request(config("gemma-3-1b", layers=6)),
    "auto": request(config("llama-3.2-1b"), EngineConfig(max_seq_len=4096, kernel_choices="auto")),
    "fp8": request(config("qwen3-0.6b"), EngineConfig(max_seq_len=4096, kv_dtype="fp8", quantize="fp8")),
    "experts": request(config("qwen3-30b-a3b")),
    # Experts with biases, attention with sinks.
    "gpt_oss": request(config("gpt-oss-20b")),
}


# What the library adds to the stream waits for the next norm's kernel, so that the next slice does not norm it.
BETWEEN_SLICES = Choices(
    {
        Matmul(4096, 1024, 16): {16: SliceTiling(16, 1024, 4, folds=True)},
        Matmul(1024, 2048, 16, "added"): {16: None},
        Matmul(6144, 1024, 16, "gated"): {16: SliceTiling(8, 1024, 4, folds=True)},
        Matmul(1024, 3072, 16, "added"): {16: None},
    }
)


@pytest.fixture(scope="module")
def asked(request: pytest.FixtureRequest) -> set[object]:
    """Names of the requests that this session has tests of."""
    here = (item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path)
    return {item.callspec.params.get("name") for item in here if hasattr(item, "callspec")}


@pytest.fixture(scope="module")
def probed(asked: set[object], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    choices = tmp_path_factory.mktemp("choices") / "library.json"
    choices.write_text(written(BETWEEN_SLICES, H200), encoding="utf-8")
    settings = EngineConfig(max_seq_len=4096, kernel_choices=str(choices))
    requests = {**REQUESTS, LIBRARY: request(config("qwen3-0.6b"), settings)}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    caches = {name: str(tmp_path_factory.mktemp("cache")) for name in ("TRITON_CACHE_DIR", "OSTRO_CACHE")}
    ran = subprocess.run(
        [sys.executable, str(PROBE)],
        input=msgspec.json.encode({name: each for name, each in requests.items() if name in {FIRST, *asked}}),
        env={**environment, **caches},
        capture_output=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr.decode()
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", some(REQUESTS, FIRST, "experts"))
def test_precompiled_kernels_are_those_that_launches_look_for(probed: Mapping[str, Any], name: str) -> None:
    keys = probed["models"][name]["keys"]
    assert keys["signatures"] == keys["keys"] > 20
    assert keys["others"] == 0


@pytest.mark.parametrize("name", some((*REQUESTS, LIBRARY), FIRST, "experts", LIBRARY))
def test_every_kernel_of_a_step_is_compiled_ahead(probed: Mapping[str, Any], name: str) -> None:
    launched = probed["models"][name]["launched"]
    assert launched["kernels"] > 20
    assert launched["missed"] == []


@pytest.mark.full
def test_hashes_of_kernels_do_not_depend_on_the_order_in_which_they_are_asked_for() -> None:
    """A hash included a called kernel's constants only if that was hashed before: six kernels were compiled twice,
    under the key of the process that compiles ahead and under the engine's.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(PROBE.with_name("kernel_hashes.py"))]
    ran = [
        subprocess.run([*command, order], env=environment, capture_output=True, check=True)
        for order in ("imported", "reversed")
    ]
    first, second = (json.loads(each.stdout) for each in ran)
    assert len(first) > 20
    assert first == second


def test_every_kernel_of_mixed_packed_weights_is_listed(probed: Mapping[str, Any]) -> None:
    """Those of the first layer alone were, and of forms with as many bits one: others were compiled by requests."""
    assert probed["packed"]["kernels"] > 20
    assert probed["packed"]["missed"] == []


def test_kernel_that_cannot_be_compiled_costs_no_other(probed: Mapping[str, Any]) -> None:
    found = probed["compiled"]
    assert found["compiled"] == 1
    assert [name.rpartition(".")[2] for name in found["failed"]] == ["_unpack_kernel"]
    # The one that can is in the cache, under the key by which it is looked for.
    assert found["hits"] == [True]


@pytest.mark.parametrize(("dtype", "words"), [("torch.bfloat16", ".v4."), ("torch.float8_e4m3fn", ".v2.")])
def test_weights_of_any_aligned_width_are_loaded_several_words_at_once(
    probed: Mapping[str, Any], dtype: str, words: str
) -> None:
    """Widths that were no multiple of 32, or with 8-bit weights of 64, were loaded word by word."""
    (load,) = probed["loads"][dtype]
    assert words in load


# ---- the process


@pytest.mark.full
def test_process_answers_what_it_compiled(compiling: Precompiler) -> None:
    compiling.begin(request(config("qwen3-0.6b"), EngineConfig(deterministic=True)))
    answer = compiling.wait()
    assert answer is not None
    assert (answer.kernels, answer.failed) == (0, {})
    assert list(answer.moments) == ["started", "imported", "ready", "asked", "listed", "compiled"]
    assert compiling.wait() is None


def test_model_that_cannot_be_built_is_no_error(compiling: Precompiler) -> None:
    compiling.begin(request({"architectures": ["NoSuchModel"]}))
    answer = compiling.wait()
    assert answer is not None
    assert answer.kernels == 0
    assert list(answer.failed) == [""]


def test_config_that_cannot_be_sent_is_no_error(compiling: Precompiler) -> None:
    for other in (1 << 80, "\ud800"):
        compiling.begin(request({"architectures": ["NoSuchModel"], "other": other}))
        assert compiling.wait() is None


def test_nobody_waits_for_a_process_that_has_ended() -> None:
    started = Precompiler()
    os.kill(started.pid, signal.SIGKILL)
    started.begin(request(config("qwen3-0.6b")))
    assert started.wait() is None
    started.close()


def test_nobody_waits_for_a_process_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ostro.backends.cuda.precompiling._MOST_SECONDS", 0.01)
    started = Precompiler()
    started.begin(request(config("qwen3-0.6b")))
    assert started.wait() is None
    assert "takes too long" in caplog.text
    started.close()


def test_process_ends_when_it_is_closed() -> None:
    started = Precompiler()
    started.close()
    with pytest.raises(ProcessLookupError):
        os.kill(started.pid, 0)


@pytest.fixture(scope="module")
def compiling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Precompiler]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        started = Precompiler()
    yield started
    started.close()


# ---- when there is one


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Two CPUs and Triton's compiler, with an empty cache."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("ostro.backends.cuda.precompiling.num_cpus", lambda: 2)
    return monkeypatch


def started(settings: EngineConfig | None = None) -> bool:
    with precompiler(config("qwen3-0.6b"), settings or EngineConfig()) as found:
        return found is not None


def test_process_is_started_where_it_helps(compiles: pytest.MonkeyPatch) -> None:
    assert started()
    assert not started(EngineConfig(deterministic=True))
    compiles.setattr("ostro.backends.cuda.precompiling.num_cpus", lambda: 1)
    assert not started()


def test_interpreter_compiles_nothing(compiles: pytest.MonkeyPatch) -> None:
    compiles.setenv("TRITON_INTERPRET", "1")
    assert not started()


def test_later_start_with_the_same_settings_needs_no_process(compiles: pytest.MonkeyPatch) -> None:
    model, settings = config("qwen3-0.6b"), EngineConfig(max_batch_seqs=16)
    compiles.setattr(Precompiler, "begin", lambda self, request: setattr(self, "_open", 1))
    compiles.setattr("ostro.backends.cuda.precompiling.receive", lambda _: msgspec.msgpack.encode(Compiled(1, {})))
    with precompiler(model, settings) as first:
        assert first is not None
        first.begin(request(model))
        first.wait()
    assert not started(settings)
    assert started(EngineConfig(max_batch_seqs=17))


def test_start_whose_kernels_come_with_the_package_needs_no_process(
    compiles: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = EngineConfig(max_batch_seqs=16)
    (tmp_path / "made").mkdir()
    pack(tmp_path / "made", tmp_path / "shipped.zip", {H200.name: [mark(config("qwen3-0.6b"), settings)]})
    compiles.setattr("ostro.backends.cuda.shipped_binaries.archive_path", lambda: tmp_path / "shipped.zip")
    compiles.setattr("ostro.backends.cuda.precompiling.first_gpu", lambda: H200)
    assert not started(settings)
    assert started(EngineConfig(max_batch_seqs=17))


def test_marks_depend_on_what_decides_which_kernels_there_are() -> None:
    model, settings = config("qwen3-0.6b"), EngineConfig()
    same = mark({**model, "transformers_version": "5.0"}, replace(settings, serving=True, threads=3))
    assert mark(model, settings) == same
    others = [
        mark({**model, "hidden_size": 2048}, settings),
        mark(model, replace(settings, kv_dtype="fp8")),
        mark({"architectures": ["NoSuchModel"]}, settings),
    ]
    assert len({same, *others}) == 4


def test_process_begins_as_soon_as_it_is_started_if_the_gpu_is_known(compiles: pytest.MonkeyPatch) -> None:
    begun: list[Request] = []
    compiles.setattr(Precompiler, "begin", lambda _, request: begun.append(request))
    compiles.setattr("ostro.backends.cuda.precompiling.open_context", lambda: None)
    compiles.setattr("ostro.backends.cuda.precompiling.first_gpu", lambda: None)
    assert started()
    assert begun == []
    compiles.setattr("ostro.backends.cuda.precompiling.first_gpu", lambda: H200)
    assert started()
    assert begun == [Request(config("qwen3-0.6b"), DEVICE_KINDS["cuda"].resolve(EngineConfig()), H200)]


def test_only_the_latest_request_is_waited_for(compiles: pytest.MonkeyPatch) -> None:
    """The second is what loading the model found out; usually it is the first again."""
    answers = [msgspec.msgpack.encode(Compiled(number, {})) for number in (1, 2)]
    compiles.setattr("ostro.backends.cuda.precompiling.receive", lambda _: answers.pop(0))
    begun = Precompiler()
    first, second = (request(config("qwen3-0.6b", layers)) for layers in (1, 2))
    for each in (first, first, second, second):
        begun.begin(each)
    answer = begun.wait()
    begun.close()
    assert answer is not None
    assert answer.kernels == 2
    assert answers == []


def test_process_that_cannot_be_started_is_reported_without_an_error(
    compiles: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(11, "no process")

    compiles.setattr("ostro.backends.cuda.precompiling.spawn", refuse)
    assert not started()
    assert "no process" in caplog.text


@pytest.fixture
def loads(compiles: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """For each load with torch on a machine that has a GPU: whether kernels are compiled ahead, and whether quantised
    weights are kept.
    """
    passed: list[tuple[bool, bool]] = []

    def note(_: OpenedModel, __: Causal, precompiler: Precompiler | None, *, keeps_quantized: bool) -> None:
        passed.append((precompiler is not None, keeps_quantized))

    compiles.setattr("ostro.backends.cuda.load.load_runner", note)
    compiles.setattr("ostro.backends.torch.load.paged_runner", lambda *_: passed.append((False, False)))
    compiles.setattr("ostro.devices.device_here", lambda name, *_: "cuda" if name == "auto" else name)
    return passed


def test_model_is_compiled_ahead_on_one_gpu_alone(loads: list[tuple[bool, bool]], tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_model(tmp_path / "model"))
    for settings in ({}, {"tensor_parallel": 2}, {"device": "cpu"}):
        load_runner(checkpoint, EngineConfig(backend="torch", **settings))
    assert loads == [(True, False), (False, False), (False, False)]


def test_no_process_is_started_for_weights_that_stay_quantised(
    loads: list[tuple[bool, bool]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A process was started without work, and the decision was made, and its reason logged, twice."""
    tensors = dict(ModelCheckpoint(savable_model(QUANTIZED), QUANTIZED).tensors())
    write_quantized(tmp_path / "model", QUANTIZED, tensors, FORMATS["gptq"])
    checkpoint = open_checkpoint(tmp_path / "model")
    with caplog.at_level("INFO"):
        one = EngineConfig(backend="torch")
        others = replace(one, tensor_parallel="auto"), replace(one, dtype="float32"), replace(one, device="cpu")
        for settings in (one, *others):
            load_runner(checkpoint, settings)
    assert loads == [(False, True), (False, True), (True, False), (False, False)]
    assert caplog.text.count("quantised weights are widened: dtype is float32") == 1
