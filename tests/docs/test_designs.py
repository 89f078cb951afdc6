"""docs/coming-from/designs.md, row by row: the design's own command line has the meaning that the page promises.

What a flag or a variable means is read where it takes effect: in what the server hands to the engine, to the gate
before it and to the HTTP layer. What an endpoint means is asked of a server that was started with the command line on
the page, one for each design.
"""

import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import torch
import yaml
from doc_pages import ROOT, Command, blocks, code_spans, commands, tables
from hrm_brain import write_brain
from levanter_directory import TINY_LLAMA, levanter_arrays, write_checkpoint, write_yaml
from live_server import LiveServer, live_server
from model_directory import write_model
from object_stores import running_store
from safetensors.torch import load_file
from sse_events import events_of

from ostro.cli import _parser, _translated, main
from ostro.cli.serve import merged_settings
from ostro.devices import DEVICE_KINDS
from ostro.errors import BadRequest
from ostro.formats.json_file import read_json_object
from ostro.server.admission.auth import Keyring
from ostro.server.models.build import roots
from ostro.server.settings import ServeSettings
from ostro.sources.cache import cache_root

PAGE = ROOT / "docs" / "coming-from" / "designs.md"
LEVANTER, SFLLM, AIOS, GCS = "Levanter's inference server", "SFLLM", "AI-OS's HRM server", "The GCS service"
CHAT = {"messages": [{"role": "user", "content": "the fox"}], "max_tokens": 4}
PREFLIGHT = {"origin": "https://page.example", "access-control-request-method": "POST"}


@dataclass(frozen=True)
class Case:
    """A line of a design's user, and its meaning: settings, or the reason for which it is refused."""

    name: str
    line: str
    means: Mapping[str, object] | str


def flag(name: str, value: object, **means: object) -> Case:
    return Case(name, f"ostro serve {name} {value}", _dotted(means))


def switch(name: str, **means: object) -> Case:
    return Case(name, f"ostro serve {name}", _dotted(means))


def variable(name: str, value: object, **means: object) -> Case:
    return Case(name, f"{name}={value} ostro serve", _dotted(means))


def refused(name: str, words: str, complaint: str) -> Case:
    return Case(name, f"ostro serve {words}", complaint)


def _dotted(means: Mapping[str, object]) -> dict[str, object]:
    """engine__dtype stands for engine.dtype."""
    return {name.replace("__", "."): value for name, value in means.items()}


CASES: Mapping[str, tuple[Case, ...]] = {
    LEVANTER: (
        flag("--hf-checkpoint", "meta-llama/Llama-3.2-1B", references=("meta-llama/Llama-3.2-1B",)),
        flag("--checkpoint-path", "runs/llama", references=("runs/llama",)),
        refused("--checkpoint-path", "--checkpoint-path runs/llama --hf-checkpoint a/b", "exclude each other"),
        flag("--tokenizer", "./tok", engine__tokenizer="./tok"),
        flag("--config", "serve.yaml", port=9000, gate__waiting_tokens=4096),
        Case("--config", "PORT=9001 ostro serve --config serve.yaml", {"port": 9001, "gate.waiting_tokens": 4096}),
        flag("--config-path", "serve.yaml", port=9000),
        flag("--host", "0.0.0.0", host="0.0.0.0"),
        flag("--port", 9000, port=9000),
        Case("--port", "ostro serve port=9000", {"port": 9000}),
        flag("--log-level", "INFO", log_level="info"),
        flag("--log-level", "Warning", log_level="warning"),
        switch("--access-log", access_log=True),
        Case("--access-log", "ostro serve --access_log false", {"access_log": False}),
        flag("--max-batch-seqs", 32, engine__max_batch_seqs=32, gate__concurrent=64),
        flag("--max-queue-tokens", 4096, gate__waiting_tokens=4096),
        flag("--max-seq-len", 512, engine__max_seq_len=512),
        flag("--page-size", 32, engine__page_size=32),
        flag("--max-new-tokens", 64, gate__new_tokens=64),
        flag("--dtype", "float32", engine__dtype="float32"),
        flag("--pages-per-seq", 8, engine__pages_per_seq=8),
        flag("--pages-per-seq", "8 --max-seq-len 512", engine__pages_per_seq=8, engine__max_seq_len=512),
        flag("--seed", 7, http__seed=7),
        Case(
            "a device mesh",
            "ostro serve --backend jax --tensor-parallel 2",
            {"engine.backend": "jax", "engine.tensor_parallel": 2},
        ),
        flag("--trainer.mesh.axes.model", 2, engine__tensor_parallel=2),
        flag("--trainer.model_axis_size", 2, engine__tensor_parallel=2),
        flag("--temperature", 0.2, http__defaults__temperature=0.2),
        flag("--model-name", "mine", served_model_name=("mine",)),
        flag("--service.max_seq_len", 512, engine__max_seq_len=512),
        flag("--service.max_seqs", 4, engine__max_batch_seqs=4, gate__concurrent=8),
        flag("--service.page_size", 32, engine__page_size=32),
        flag("--service.max_pages_per_seq", 8, engine__pages_per_seq=8),
        flag("--service.hbm_utilization", 0.5, engine__gpu_memory_utilization=0.5),
        flag("--service.max_tokens_per_round", 128, engine__max_batch_tokens=128),
        flag("--service.seed", 7, http__seed=7),
        flag("--trainer.mp", "p=f32,c=bf16", engine__dtype="bfloat16"),
        flag("--trainer.mp", "f32", engine__dtype="float32"),
        refused("--service.max_pages", "--service.max_pages 64", "--max-running-tokens, which is max_pages times"),
        refused("--service.max_queued_tokens", "--service.max_queued_tokens 64", "--max-queue-tokens"),
        refused("--trainer.num_train_steps", "--trainer.num_train_steps 5", "a server does not train"),
        refused("--optimizer.learning_rate", "--optimizer.learning_rate 1", "a server does not train"),
        refused("--model.num_layers", "--model.num_layers 3", "shape comes with its checkpoint"),
        variable("LEVANTER_API_KEY", "hush", keyring=Keyring.of(["hush"])),
    ),
    SFLLM: (
        flag("--model", "./my-model", references=("./my-model",)),
        flag("--host", "0.0.0.0", host="0.0.0.0"),
        flag("--port", 8081, port=8081),
        flag("--dtype", "auto", engine__dtype="auto"),
        flag("--dtype", "half", engine__dtype="float16"),
        flag("--log-level", "DEBUG", log_level="debug"),
        switch("--enable-cors", enable_cors=True, cors_origins=("*",)),
        flag("--api-key", "hush", keyring=Keyring.of(["hush"])),
        Case(
            "--allow-credentials",
            "ostro serve --allow-credentials --cors-origins https://page.example",
            {"enable_cors": True, "cors_credentials": True, "cors_origins": ("https://page.example",)},
        ),
        refused("--allow-credentials", "--enable-cors --allow-credentials", "needs origins by name"),
        flag("--max-context-length", 4096, engine__max_seq_len=4096),
        flag("--max-batch-size", 32, engine__max_batch_seqs=32, gate__concurrent=64),
        flag("--max-running-tokens", 2048, engine__max_running_tokens=2048, engine__max_batch_tokens=None),
        switch("--disable-cuda-graph", engine__cuda_graphs=False),
        switch("--enable-chunked-prefill", enable_chunked_prefill=True),
        refused("--enable-chunked-prefill", "--no-enable-chunked-prefill", "always computed in chunks"),
        flag("--cuda-graph-max-bs", 8, engine__cuda_graph_max_bs=8),
    ),
    AIOS: (
        flag("--model-path", "brains/b/mind/student.pt", references=("brains/b/mind/student.pt",)),
        flag("--tokenizer-path", "./tok", engine__tokenizer="./tok"),
        flag("--max-batch-size", 8, engine__max_batch_seqs=8),
        flag("--max-new-tokens", 128, gate__new_tokens=128),
        flag("--context-window", 512, engine__max_seq_len=512),
        flag("--num-heads", 8, engine__hrm_num_heads=8),
        flag("--h-cycles", 2, engine__hrm_h_cycles=2),
        flag("--l-cycles", 3, engine__hrm_l_cycles=3),
        flag("--h-layers", 4, engine__hrm_h_layers=4),
        flag("--l-layers", 5, engine__hrm_l_layers=5),
        flag("--device", "cpu", engine__device="cpu"),
        flag("--device", "mps", engine__device="mps"),
        switch("--enable-cors", enable_cors=True),
        flag("--cors-origins", "https://a.example", enable_cors=True, cors_origins=("https://a.example",)),
        flag("--log-level", "INFO", log_level="info"),
        variable("AIOS_MODEL_PATH", "./brain", references=("./brain",)),
        variable("AIOS_TOKENIZER_PATH", "./tok", engine__tokenizer="./tok"),
        variable("AIOS_DEVICE", "cpu", engine__device="cpu"),
        Case("AIOS_DEVICE", "AIOS_DEVICE=cuda ostro serve --device cpu", {"engine.device": "cpu"}),
        variable("AIOS_MAX_BATCH_SIZE", 8, engine__max_batch_seqs=8),
        Case("AIOS_MAX_BATCH_SIZE", "AIOS_MAX_BATCH_SIZE=9 ostro serve --config hrm.yaml", {"max_batch_seqs": 9}),
        variable("AIOS_MAX_NEW_TOKENS", 128, gate__new_tokens=128),
        variable(
            "AIOS_CORS_ORIGINS",
            "https://a.example,https://b.example",
            enable_cors=True,
            cors_origins=("https://a.example", "https://b.example"),
        ),
    ),
    GCS: (
        Case(
            "GCS_BUCKET",
            "GCS_BUCKET=my-models ostro serve --device cpu",
            {
                "roots": ("gs://my-models/models/",),
                "port": 8080,
                "pool.models": 2,
                "gate.concurrent": 50,
                "gate.seconds": 300.0,
                "http.defaults.max_tokens": 512,
                "http.defaults.temperature": 0.7,
            },
        ),
        Case("GCS_MODEL_PREFIX", "GCS_BUCKET=b GCS_MODEL_PREFIX=llms/ ostro serve", {"roots": ("gs://b/llms/",)}),
        variable("MAX_CACHED_MODELS", 3, pool__models=3),
        variable("MAX_CONCURRENT_REQUESTS", 7, gate__concurrent=7),
        variable("REQUEST_TIMEOUT", 30, gate__seconds=30.0),
        variable("DEFAULT_MAX_TOKENS", 99, http__defaults__max_tokens=99),
        variable("DEFAULT_TEMPERATURE", 0.1, http__defaults__temperature=0.1),
        variable(
            "LOCAL_DEV", "true", engine__device="cpu", engine__quantize="int8", pool__models=1, gate__concurrent=1
        ),
        variable("LOCAL_DEV", "false", engine__device="auto", engine__quantize="none", pool__models=None),
        variable("PORT", 9090, port=9090),
        variable("LOCAL_MODEL_CACHE", "./kept", cache=Path("kept")),
    ),
}
LINES = (
    Case(
        LEVANTER,
        "ostro serve --config serve.yaml --hf-checkpoint meta-llama/Llama-3.2-1B --tokenizer ./tok --host 0.0.0.0 "
        "--seed 7 --log-level INFO --access-log --max-batch-seqs 32 --dtype float32",
        {"references": ("meta-llama/Llama-3.2-1B",), "port": 9000, "gate.waiting_tokens": 4096, "http.seed": 7},
    ),
    Case(
        LEVANTER,
        "ostro serve --config_path sample.yaml --service.max_seqs 4 --engine.page_size 32 port=9001 "
        "--trainer.mesh.axes.model -1 --access_log false",
        {
            "references": ("org/name",),
            "engine.max_batch_seqs": 4,
            "engine.page_size": 32,
            "engine.max_seq_len": 512,
            "engine.tensor_parallel": "auto",
            "http.defaults.temperature": 0.3,
            "http.defaults.max_tokens": 48,
            "gate.new_tokens": None,
            "port": 9001,
        },
    ),
    Case(
        SFLLM,
        "ostro serve --model ./my-model --host 0.0.0.0 --port 8081 --dtype auto --max-context-length 4096 "
        "--max-running-tokens 2048 --max-batch-size 32 --cuda-graph-max-bs 8 --enable-chunked-prefill --log-level info "
        "--enable-cors --api-key hush",
        {"references": ("./my-model",), "engine.max_seq_len": 4096, "engine.max_batch_seqs": 32, "port": 8081},
    ),
    Case(
        AIOS,
        "ostro serve hrm --model-path brains/actv1/actv1_student.pt --tokenizer-path ./tok --device cpu "
        "--max-batch-size 16 --max-new-tokens 128 --context-window 512 --enable-cors --cors-origins http://a.example "
        "--log-level WARN",
        {
            "references": ("brains/actv1/actv1_student.pt",),
            "engine.tokenizer": "./tok",
            "engine.max_batch_seqs": 16,
            "gate.new_tokens": 128,
            "engine.max_seq_len": 512,
            "log_level": "warning",
        },
    ),
    Case(
        GCS,
        "GCS_BUCKET=b GCS_MODEL_PREFIX=llms/ MAX_CACHED_MODELS=3 MAX_CONCURRENT_REQUESTS=7 REQUEST_TIMEOUT=30 "
        "DEFAULT_MAX_TOKENS=99 DEFAULT_TEMPERATURE=0.1 PORT=9090 LOCAL_DEV=false ostro serve",
        {"roots": ("gs://b/llms/",), "pool.models": 3, "gate.concurrent": 7, "gate.seconds": 30.0, "port": 9090},
    ),
    Case(
        GCS,
        "GCS_BUCKET=b LOCAL_DEV=true ostro serve",
        {"pool.models": 1, "gate.concurrent": 1, "engine.device": "cpu", "engine.quantize": "int8", "port": 8080},
    ),
)
"""Whole lines of the designs' users, everything after the program's name as it stands, and some of what they mean."""

SHOWN: dict[str, set[str]] = {design: {case.name for case in cases} for design, cases in CASES.items()}
"""What of each design's rows is checked: by the cases above and the tests below that say so."""

Test = TypeVar("Test", bound=Callable[..., None])


def shows(design: str, *names: str) -> Callable[[Test], Test]:
    """Marks a test as the check of these names of the page."""

    def mark(test: Test) -> Test:
        SHOWN[design].update(names)
        return test

    return mark


def test_exactly_the_promised_names_are_checked() -> None:
    promised: dict[str, set[str]] = {}
    for table in tables(PAGE):
        for theirs, *_ in table.rows:
            promised.setdefault(table.section, set()).update(code_spans(theirs) or [theirs])
    assert promised == SHOWN


# --- flags and variables ----------------------------------------------------------------------------------------------


@pytest.fixture
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory but for three config files, and no variable of any design."""
    for design in (*CASES.values(), LINES):
        for case in design:
            for name, _ in command(case.line).variables:
                monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("OSTRO_CACHE", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "serve.yaml").write_text("port: 9000\nmax_queue_tokens: 4096\n")
    sample = "trainer: {mp: f32}\nhf_checkpoint: org/name\nengine: {max_seq_len: 512}\nprompts: [Hi]\n"
    (tmp_path / "sample.yaml").write_text(f"{sample}max_new_tokens: 48\ntemperature: 0.3\n")
    (tmp_path / "hrm.yaml").write_text("serve:\n  hrm:\n    model_path: ./brain\n    max_batch_size: 5\n")
    return tmp_path


def command(line: str) -> Command:
    [found] = commands(next(blocks("a case", f"```bash\n{line}\n```\n")))
    return found


def meaning(settings: ServeSettings, name: str) -> object:
    match name.split("."):
        case ["roots"]:
            return roots(settings)
        case ["cache"]:
            return cache_root()
        case [part, *fields] if fields:
            return attrgetter(".".join(fields))(getattr(settings, part)())
    value = getattr(settings, name)
    return value() if callable(value) else value


def settings_by(line: Command) -> ServeSettings:
    words = _translated(line.words[1:])
    return merged_settings(_parser(words).parse_args(words)).settings


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=f"{design}: {case.line}") for design, cases in CASES.items() for case in cases]
    + [pytest.param(case, id=f"{case.name}, whole: {case.line}") for case in LINES],
)
def test_a_line_of_the_design_means_what_the_page_says(
    case: Case, clean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = command(case.line)
    for name, value in line.variables:
        monkeypatch.setenv(name, value)
    if isinstance(case.means, str):
        with pytest.raises(BadRequest, match=case.means):
            settings_by(line)
    else:
        settings = settings_by(line)
        assert {name: meaning(settings, name) for name in case.means} == case.means


@shows(AIOS, "--print-config")
def test_print_config_prints_the_settings_and_starts_nothing(clean: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command_of(AIOS).words[1:], "--config", "hrm.yaml", "--print-config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    # The section serve: hrm: of the file names another model; the command line beats it.
    assert printed["model"] == ["brains/actv1/mind/actv1_student.safetensors"]
    assert (printed["max_batch_seqs"], printed["device"], printed["ui"]) == (5, "cpu", True)


def test_a_dotenv_file_is_read_and_the_environment_beats_it(clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (clean / ".env").write_text("GCS_BUCKET=my-models\nPORT=9090\nMAX_CACHED_MODELS=3\n")
    monkeypatch.setenv("MAX_CACHED_MODELS", "4")
    settings = settings_by(command("ostro serve"))
    assert (roots(settings), settings.port, settings.max_models) == (("gs://my-models/models/",), 9090, 4)


def test_the_precision_of_trainer_mp_needs_a_gpu_as_the_page_says(clean: Path) -> None:
    with pytest.raises(BadRequest, match="does not run on a CPU"):
        DEVICE_KINDS["cpu"].check(settings_by(command("ostro serve --trainer.mp p=f32,c=bf16")).engine())


# --- servers, started as the page says --------------------------------------------------------------------------------


def command_of(design: str) -> Command:
    """The command line that the page gives."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {design}\n")[2]
    [found] = commands(next(blocks(PAGE.name, section)))
    return found


@contextmanager
def served(design: str, directory: Path, *more: str, faults: str = "", **env: str) -> Iterator[LiveServer]:
    """The command line of the page in a directory that has its files, with more options; not ready when entered."""
    line = command_of(design)
    assert line.words[:2] == ("ostro", "serve")
    options = (*line.words[2:], *more)
    with live_server(directory, *options, faults=faults, env={**dict(line.variables), **env}, ready=False) as live:
        yield live


def until_ok(client: httpx.Client, path: str) -> None:
    deadline = time.monotonic() + 120
    while client.get(path).status_code != 200:
        assert time.monotonic() < deadline, client.get(path).text
        time.sleep(0.05)


def until_counted(client: httpx.Client) -> Any:
    """The statistics of the only model, once its engine has sent some."""
    deadline = time.monotonic() + 120
    while not (stats := client.get("/admin/stats").json()["models"][0])["pages"]:
        assert time.monotonic() < deadline, stats
        time.sleep(0.05)
    return stats


def post(client: httpx.Client, path: str, body: Mapping[str, object]) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def refusal(client: httpx.Client, path: str, body: Mapping[str, object]) -> tuple[int, str]:
    response = client.post(path, json=body)
    return response.status_code, response.json()["error"]["message"]


@pytest.mark.full
@shows(LEVANTER, "/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/healthz")
def test_levanters_command_line_serves_its_checkpoint(tmp_path: Path) -> None:
    export = write_model(tmp_path / "tok")
    arrays = levanter_arrays(load_file(export / "model.safetensors"), read_json_object(export / "config.json"))
    write_checkpoint(tmp_path / "runs" / "llama" / "step-1000", arrays)
    write_yaml(tmp_path / "llama.yaml", TINY_LLAMA)
    more = "--page-size 8 --pages-per-seq 6 --max-new-tokens 20 --seed 7 --temperature 0 --model-name mine"
    options = (*shlex.split(more), "--healthz-waits-for-model", "--access_log", "false", "--log-level", "DEBUG")
    with (
        served(LEVANTER, tmp_path, *options, LEVANTER_API_KEY="hush") as live,
        live.client(authorization="Bearer hush") as client,
    ):
        until_ok(client, "/healthz")
        assert client.get("/readyz").json() == {"status": "ready"}
        assert client.get("/v1/models", headers={"authorization": ""}).status_code == 401
        [card] = client.get("/v1/models").json()["data"]
        assert (card["id"], card["max_model_len"]) == ("mine", 48)

        def text(**fields: object) -> str:
            body = {"prompt": "the fox", "max_tokens": 16, "ignore_eos": True, **fields}
            return str(post(client, "/v1/completions", body)["choices"][0]["text"])

        assert text() == text(temperature=0) != text(temperature=2)
        assert text(temperature=2) == text(temperature=2, seed=7) != text(temperature=2, seed=8)
        assert post(client, "/v1/chat/completions", CHAT)["choices"][0]["message"]["role"] == "assistant"
        status, message = refusal(client, "/v1/completions", {"prompt": "the fox", "max_tokens": 21})
        assert (status, "20" in message) == (400, True)
        status, message = refusal(client, "/v1/completions", {"prompt": "the fox " * 48, "max_tokens": 1})
        assert (status, "48" in message) == (400, True)
        # A model that was made to write has no vectors to give.
        status, message = refusal(client, "/v1/embeddings", {"input": "the fox"})
        assert (status, "embedding" in message) == (400, True)
        assert "/v1/completions" not in live.log_text


@pytest.mark.full
@shows(SFLLM, "/docs", "/redoc", "/v1/models", "/v1/completions", "/v1/chat/completions", "/health")
def test_sfllms_command_line_serves_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_model(tmp_path / "my-model") / "config.json"
    config.write_text(json.dumps({**read_json_object(config), "max_position_embeddings": 4096}))
    options = ("--api-key", "hush", "--any-model-name", "--no-date-header", "--log-level", "debug", "--device", "cpu")
    with (
        served(SFLLM, tmp_path, *options, faults="load_seconds=2") as live,
        live.client(authorization="Bearer hush") as client,
    ):
        loading = client.get("/health")
        assert (loading.status_code, loading.json()["status"]) == (503, "loading")
        until_ok(client, "/health")
        health = client.get("/health", headers={"authorization": ""}).json()
        assert (health["status"], health["device"], health["gpu"]) == ("ok", "cpu", False)
        assert health["backend"].startswith(("native (", "torch ("))
        assert client.get("/v1/models", headers={"authorization": ""}).status_code == 401
        [card] = client.get("/v1/models").json()["data"]
        assert {"id", "object", "created", "owned_by", "permission", "root", "parent"} <= card.keys()
        assert (card["id"], card["max_model_len"]) == ("my-model", 2048)
        assert until_counted(client)["pages"] * 16 == 2048
        for path in ("/docs", "/redoc"):
            assert "<html" in client.get(path, follow_redirects=True).text
        allowed = client.options("/v1/completions", headers=PREFLIGHT)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "*")
        body = {"model": "gpt-3.5-turbo", "prompt": "the fox", "max_tokens": 4, "echo": True}
        answer = client.post("/v1/completions", json=body)
        assert answer.json()["choices"][0]["text"].startswith("the fox")
        assert "date" not in answer.headers
        assert post(client, "/v1/chat/completions", CHAT)["usage"]["completion_tokens"] <= 4
        assert '"request begins"' in live.log_text
        monkeypatch.setenv("OSTRO_API_KEY", "hush")
        measure = "--concurrency 1,2 --requests 2 --max-tokens 4 --prompt fox --output-file"
        assert main(["bench", "--url", live.url, *measure.split(), str(tmp_path / "bench.json")]) == 0
        assert (tmp_path / "bench.json").stat().st_size > 0


@pytest.mark.full
@shows(AIOS, "/generate", "/generate_stream", "/loglikelihood", "/healthz", "/readyz", "--ui")
def test_the_command_line_of_ai_os_serves_its_brain(tmp_path: Path) -> None:
    write_brain(tmp_path / "brains" / "actv1", vocab=700)
    write_model(tmp_path / "tok")
    variables = {
        "AIOS_MAX_NEW_TOKENS": "8",
        "AIOS_CORS_ORIGINS": "https://page.example",
        "AIOS_DEVICE": "cuda",
        "AIOS_MODEL_PATH": "./nowhere",
    }
    with served(AIOS, tmp_path, "--context-window", "64", **variables) as live, live.client() as client:
        alive = client.get("/healthz")
        assert (alive.status_code, alive.json()) == (200, {"status": "ok"})
        until_ok(client, "/readyz")
        assert client.get("/readyz").json() == {"status": "ready"}
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 64
        assert client.get("/").headers["content-type"].startswith("text/html")
        allowed = client.options("/generate", headers=PREFLIGHT)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://page.example")
        body: dict[str, object] = {"prompts": ["the fox", "yes"], "max_tokens": 8, "seed": 1}
        answer = post(client, "/generate", body)
        assert len(answer["completions"]) == 2
        assert answer["usage"].keys() >= {"prompt_tokens", "completion_tokens", "total_tokens"}
        events = events_of(client.post("/generate_stream", json=body).text)
        texts = ["".join(each["text"] for each in events if each.get("index") == number) for number in range(2)]
        assert texts == answer["completions"]
        scores = post(client, "/loglikelihood", {"prompts": ["the fox"], "continuations": [" jumps"]})
        assert [score < 0 for score in scores["ll"]] == [True]
        assert refusal(client, "/generate", {**body, "max_tokens": 9})[0] == 400
        assert refusal(client, "/generate", {**body, "prompts": []})[0] in (400, 422)
        assert refusal(client, "/loglikelihood", {"prompts": ["a"], "continuations": []})[0] in (400, 422)


@pytest.mark.full
@shows(AIOS, "--dry-run")
def test_dry_run_loads_the_brain_reports_and_exits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_brain(tmp_path / "brains" / "actv1", vocab=700)
    write_model(tmp_path / "tok")
    monkeypatch.chdir(tmp_path)
    assert main([*command_of(AIOS).words[1:], "--context-window", "64", "--max-batch-size", "4", "--dry-run"]) == 0
    report = {label: value.strip() for label, value in (x.split(":", 1) for x in capsys.readouterr().out.splitlines())}
    assert (report["longest sequence"], report["at a time"]) == ("64 tokens", "8 requests")


@pytest.mark.full
def test_ai_os_acceptance_line_needs_no_brain_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dialect comes from the weights' name; what no tensor reveals is listed at once."""
    weights = write_brain(tmp_path / "brains" / "actv1", vocab=700)
    torch.save(load_file(weights), tmp_path / "brains" / "actv1_student.pt")
    brain = read_json_object(tmp_path / "brains" / "actv1" / "brain.json")
    (tmp_path / "settings.json").write_text(json.dumps(brain))
    write_model(tmp_path / "tok")
    monkeypatch.chdir(tmp_path)
    line = "serve hrm --model-path brains/actv1_student.pt --tokenizer-path ./tok --device cpu --dry-run"
    assert main(line.split()) == 1
    assert "--num-heads and --h-cycles and --l-cycles and --max-seq-len" in capsys.readouterr().err
    assert main([*line.split(), "--hrm-config", "settings.json", "--context-window", "64"]) == 0
    assert "64 tokens" in capsys.readouterr().out


@pytest.mark.full
@shows(
    GCS,
    "/v1/models",
    "/v1/chat/completions",
    "/v1/completions",
    "/health",
    "/admin/load/{model}",
    "/admin/unload/{model}",
    "/admin/stats",
)
def test_the_gcs_services_command_line_serves_its_bucket(tmp_path: Path) -> None:
    with running_store("gs", bucket="my-models") as store:
        for name in ("one", "org/two", "three"):
            files = {path.name: path.read_bytes() for path in write_model(tmp_path / name).iterdir()}
            store.put_model(f"models/{name}", files)
        environment = {
            **store.environment(store.url),
            "LOCAL_MODEL_CACHE": str(tmp_path / "kept"),
            "OSTRO_CACHE": "",
            "DEFAULT_MAX_TOKENS": "3",
        }
        with served(GCS, tmp_path, faults="fake", **environment) as live, live.client() as client:
            until_ok(client, "/health")
            health = client.get("/health").json()
            assert (health["status"], health["device"], health["gpu"]) == ("ok", None, False)
            states = {card["id"]: card["state"] for card in client.get("/v1/models").json()["data"]}
            assert states == {"one": "available", "org/two": "available", "three": "available"}
            answer = post(client, "/v1/completions", {"model": "one", "prompt": "the fox", "ignore_eos": True})
            assert answer["usage"]["completion_tokens"] == 3
            assert client.get("/health").json()["device"] == "cpu"
            assert post(client, "/v1/chat/completions", {**CHAT, "model": "org-two"})["model"] == "org/two"
            assert post(client, "/admin/load/three", {})["state"] == "ready"
            stats = client.get("/admin/stats").json()
            assert stats["max_models"] == 2
            assert {model["id"]: model["state"] for model in stats["models"]} == {
                "one": "available",
                "org/two": "ready",
                "three": "ready",
            }
            assert post(client, "/admin/unload/org/two", {})["state"] == "available"
            missing = client.post("/v1/completions", json={"model": "four", "prompt": "the fox"})
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        assert any(path.name == "model.safetensors" for path in (tmp_path / "kept").rglob("*"))
