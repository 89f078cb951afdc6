"""A small Hub of our own on the loopback. Its client reads its settings on import, so it runs in another process."""

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "acme/tiny-llama"


WEIGHTS = 1 << 20
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "tie_word_embeddings": True,
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def safetensors(name: str) -> bytes:
    entry = {"dtype": "U8", "shape": [WEIGHTS], "data_offsets": [0, WEIGHTS]}
    header = json.dumps({name: entry}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(WEIGHTS)


FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "generation_config.json": b'{"eos_token_id": 7}',
    "tokenizer.json": b"{}",
    "tokenizer.model": b"pieces",
    "chat_template.jinja": b"{{ messages }}",
    "1_Pooling/config.json": b'{"pooling_mode_cls_token": true}',
    "model.safetensors": safetensors("model.norm.weight"),
    "pytorch_model.bin": b"a pickle",
    "modeling_tiny.py": b"raise SystemExit",
    "onnx/model.safetensors": b"something else",
}


@dataclass
class Hub:
    server: ThreadingHTTPServer
    refusal: tuple[int, dict[str, str]] | None = None
    breaks_off: bool = False
    """Whether files end in the middle."""
    served: list[str] = field(default_factory=list)
    num_bytes: int = 0
    """Of files, that were sent."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if self.hub.refusal is not None:
            status, headers = self.hub.refusal
            self.reply(status, b"{}", headers)
        elif path in (f"/api/models/{REPO}/revision/{revision}" for revision in ("main", "v1", COMMIT)):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in FILES.items()]
            self.reply_json({"id": REPO, "modelId": REPO, "sha": COMMIT, "siblings": siblings, "tags": []})
        elif path.startswith(f"/api/models/{REPO}/revision/"):
            self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif path == f"/api/models/{REPO}/tree/{COMMIT}":
            self.reply_json([entry(name, data) for name, data in FILES.items()])
        elif path.startswith(prefix := f"/{REPO}/resolve/{COMMIT}/") and (name := path[len(prefix) :]) in FILES:
            self.reply_file(name)
        else:
            self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def reply_file(self, name: str) -> None:
        data, status = FILES[name], 200
        headers = {"ETag": f'"{digest(data)}"', "X-Repo-Commit": COMMIT}
        if self.command == "GET":
            if asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"] or ""):
                status, data = 206, data[int(asked[1]) : int(asked[2]) + 1]
            self.hub.served.append(name)
            self.hub.num_bytes += len(data)
        self.reply(status, data, headers)

    def reply_json(self, value: object) -> None:
        self.reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body)), "Accept-Ranges": "bytes"}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET" and self.hub.breaks_off and "/resolve/" in self.path:
            self.wfile.write(body[: len(body) // 2])
            self.connection.shutdown(socket.SHUT_RDWR)
        elif self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""


def digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def entry(name: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(data), "oid": digest(data)}


@pytest.fixture
def hub() -> Iterator[Hub]:
    class Bound(Answer):
        pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Bound)
    Bound.hub = Hub(server)
    thread = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield Bound.hub
    server.shutdown()
    server.server_close()
    thread.join()


PROGRAM = """
import json, sys
from ostro.errors import OstroError
from ostro.weights import open_checkpoint
try:
    checkpoint = open_checkpoint(sys.argv[1], progress=False)
    files = [str(path.relative_to(checkpoint.path)) for path in checkpoint.path.rglob("*") if path.is_file()]
    print(json.dumps([checkpoint.name, sorted(files), checkpoint.generation_config]))
except OstroError as error:
    print(type(error).__name__, error.message)
"""


def open_from(hub: Hub | str, tmp_path: Path, ref: str = REPO, *, program: str = PROGRAM, **environment: str) -> str:
    """What a fresh process says of the model."""
    address = hub if isinstance(hub, str) else hub.address
    cleared = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    settings = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
    # Run where no directory could be taken for the model.
    result = subprocess.run(
        [sys.executable, "-c", program, ref],
        env=cleared | settings,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_a_hub_model_is_fetched_without_pickles_or_code_and_opens(hub: Hub, tmp_path: Path) -> None:
    name, files, generation_config = json.loads(open_from(hub, tmp_path))
    assert name == REPO
    assert files == sorted(FILES.keys() - {"pytorch_model.bin", "modeling_tiny.py", "onnx/model.safetensors"})
    assert generation_config == {"eos_token_id": 7}
    assert sorted(hub.served) == files


def test_a_revision_can_be_named_and_a_cached_model_opens_offline(hub: Hub, tmp_path: Path) -> None:
    online = open_from(hub, tmp_path, f"{REPO}@v1")
    served = len(hub.served)
    assert open_from(hub, tmp_path, f"{REPO}@v1", HF_HUB_OFFLINE="1") == online
    assert len(hub.served) == served


def test_an_unknown_repository_is_not_found(hub: Hub, tmp_path: Path) -> None:
    assert open_from(hub, tmp_path, "acme/none").startswith("ModelNotFound The Hub has no model acme/none")


def test_an_unknown_revision_is_not_found(hub: Hub, tmp_path: Path) -> None:
    output = open_from(hub, tmp_path, f"{REPO}@v9")
    assert output == f"ModelNotFound The Hub's repository {REPO} has no revision 'v9'."


def test_a_download_that_breaks_off_says_so(hub: Hub, tmp_path: Path) -> None:
    hub.breaks_off = True
    output = open_from(hub, tmp_path, HF_HUB_DOWNLOAD_TIMEOUT="2")
    assert output.startswith(f"DownloadFailed The connection to the Hub broke off while {REPO} was fetched")


def test_a_gated_repository_asks_for_a_token(hub: Hub, tmp_path: Path) -> None:
    hub.refusal = (403, {"X-Error-Code": "GatedRepo"})
    output = open_from(hub, tmp_path)
    assert output.startswith("DownloadFailed The Hub gives acme/tiny-llama only")
    assert "HF_TOKEN" in output


def test_offline_without_a_cached_copy_is_a_failed_download(hub: Hub, tmp_path: Path) -> None:
    output = open_from(hub, tmp_path, HF_HUB_OFFLINE="1")
    assert output.startswith("DownloadFailed The Hub could not be reached for acme/tiny-llama")
    assert "HF_HUB_OFFLINE" in output


def test_a_hub_that_cannot_be_reached_is_a_failed_download(tmp_path: Path) -> None:
    # Nothing listens on the discard port.
    output = open_from("http://127.0.0.1:9", tmp_path)
    assert output.startswith("DownloadFailed The Hub could not be reached")


@contextmanager
def silent_hub() -> Iterator[tuple[str, list[socket.socket]]]:
    """An address that takes connections and never answers, and those that it took."""
    taken: list[socket.socket] = []

    def take(server: socket.socket) -> None:
        while True:
            try:
                taken.append(server.accept()[0])
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = Thread(target=take, args=(server,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", taken
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in taken:
        connection.close()


IMPATIENT = PROGRAM.replace("try:", "from ostro.weights import hub; hub._ANSWER_SECONDS = 0.5\ntry:", 1)


@pytest.mark.parametrize("ref", [REPO, f"{REPO}@v1"])
def test_a_cached_model_opens_though_the_hub_is_silent(hub: Hub, tmp_path: Path, ref: str) -> None:
    """It waited for an answer for ever."""
    online = open_from(hub, tmp_path, ref)
    with silent_hub() as (address, taken):
        assert open_from(address, tmp_path, ref, program=IMPATIENT) == online
        assert taken


def test_a_cached_model_opens_though_the_hub_is_out_of_order(hub: Hub, tmp_path: Path) -> None:
    online = open_from(hub, tmp_path)
    hub.refusal = (503, {})
    assert open_from(hub, tmp_path) == online


def test_the_hub_is_not_asked_for_a_commit_that_is_cached(hub: Hub, tmp_path: Path) -> None:
    ref = f"{REPO}@{COMMIT}"
    online = open_from(hub, tmp_path, ref)
    with silent_hub() as (address, taken):
        assert open_from(address, tmp_path, ref) == online
        assert not taken


def test_a_commit_of_which_weights_are_missing_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    ref = f"{REPO}@{COMMIT}"
    online = open_from(hub, tmp_path, ref)
    [weights] = (tmp_path / "hf").rglob("snapshots/*/model.safetensors")
    weights.unlink()
    assert open_from(hub, tmp_path, ref) == online


def test_a_silent_hub_and_no_copy_is_a_failed_download(tmp_path: Path) -> None:
    with silent_hub() as (address, _):
        output = open_from(address, tmp_path, program=IMPATIENT)
    assert output.startswith("DownloadFailed The Hub could not be reached")


PLAN = """
import sys
from ostro.config import EngineConfig
from ostro.planning import plan
found = plan(sys.argv[1], EngineConfig(device="cpu"), memory=1 << 33)
print(found.model, found.parameters, found.fits)
"""


def test_a_hub_model_is_planned_by_its_headers(hub: Hub, tmp_path: Path) -> None:
    assert open_from(hub, tmp_path, program=PLAN) == f"{REPO} {WEIGHTS} True"
    assert set(hub.served) == {"config.json", "model.safetensors"}
    assert hub.num_bytes < WEIGHTS / 10
    open_from(hub, tmp_path)
    # What is here needs no Hub.
    with silent_hub() as (address, taken):
        assert open_from(address, tmp_path, program=PLAN) == f"{REPO} {WEIGHTS} True"
        assert not taken


def test_a_full_disk_is_named_with_its_cure(hub: Hub, tmp_path: Path) -> None:
    limited = PROGRAM.replace("import json, sys", "import json, resource, sys; resource.setrlimit(1, (40, 40))")
    output = open_from(hub, tmp_path, program=limited)
    assert output.startswith(f"DiskFull No room for {REPO} in")
    assert "HF_HOME" in output
