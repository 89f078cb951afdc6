"""`ostro serve` as a process: how it starts, what it refuses, how it ends."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from live_server import LiveServer, live_server
from model_directory import write_model
from warm_start import warm_run

SLOW = "fake,step_seconds=0.05"


def serve(directory: Path, *args: str, faults: str = "fake", **env: str) -> subprocess.CompletedProcess[str]:
    """Runs it until it ends by itself."""
    return warm_run(["serve", *args], cwd=directory, environment={**os.environ, "OSTRO_FAULTS": faults, **env})


class Streaming(threading.Thread):
    """A client that reads a stream of so many tokens to its end."""

    def __init__(self, url: str, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.started_reading = threading.Event()
        self.lines: list[str] = []
        self.error: httpx.HTTPError | None = None
        self._url = url
        self._body = {"prompt": "a", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        self.start()
        assert self.started_reading.wait(60), "the stream did not begin"

    def run(self) -> None:
        try:
            with httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=30) as response:
                for line in response.iter_lines():
                    self.lines += [line] if line else []
                    self.started_reading.set()
        except httpx.HTTPError as error:
            self.error = error

    def ended(self) -> list[str]:
        self.join(60)
        assert not self.is_alive()
        return self.lines


def until_draining(server: LiveServer) -> None:
    deadline = time.monotonic() + 60
    while '"draining"' not in server.log_text:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def until_closed(connection: socket.socket) -> bytes:
    read = b""
    while part := connection.recv(1 << 16):
        read += part
    return read


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock.getsockname()[1]


@pytest.mark.full
def test_server_is_alive_at_once_and_ready_only_once_the_model_is(tmp_path: Path) -> None:
    began = time.monotonic()
    args = ("--load-timeout", "0.2")
    with live_server(tmp_path, *args, faults="fake,load_seconds=8", ready=False) as server, server.client() as client:
        assert client.get("/healthz").json() == {"status": "ok"}
        unready = client.get("/readyz")
        assert (unready.status_code, unready.json()["status"]) == (503, "loading")
        refused = client.post("/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        while client.get("/readyz").status_code != 200:
            assert time.monotonic() - began < 120
            time.sleep(0.05)
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200


@pytest.mark.full
def test_a_request_waits_for_a_model_that_loads(tmp_path: Path) -> None:
    with live_server(tmp_path, faults="fake,load_seconds=5", ready=False) as server, server.client() as client:
        assert client.get("/readyz").status_code == 503
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200


@pytest.mark.full
def test_sigterm_lets_requests_finish_and_refuses_new_ones(tmp_path: Path) -> None:
    with live_server(tmp_path, faults=SLOW) as server, server.client() as client:
        stream = Streaming(server.url, 30)
        server.process.send_signal(signal.SIGTERM)
        until_draining(server)
        assert client.get("/healthz").status_code == 200
        unready = client.get("/readyz")
        assert (unready.status_code, unready.json()["status"]) == (503, "draining")
        refused = client.post("/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert refused.json()["error"]["message"] == "The server is shutting down."
        assert stream.ended()[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in stream.lines[-2]
        assert server.process.wait(60) == 0


@pytest.mark.full
def test_request_whose_head_is_still_arriving_is_answered_by_a_server_that_ends(tmp_path: Path) -> None:
    """Its connection is not an idle one."""
    body = b'{"prompt": "a", "max_tokens": 2}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with live_server(tmp_path) as server, server.client() as idle:
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        with socket.create_connection(address, 10) as new, socket.create_connection(address, 10) as kept:
            kept.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            answered = b""
            while not answered.endswith(b"}"):
                answered += kept.recv(1 << 16)
            for connection in (new, kept):
                connection.sendall(request[:60])
            # Once these are answered, what was sent before them has arrived.
            for _ in range(3):
                assert idle.get("/healthz").status_code == 200
            with socket.create_connection(address, 10) as unused:
                assert idle.get("/healthz").status_code == 200
                server.process.send_signal(signal.SIGTERM)
                assert unused.recv(1) == b"", "closed at once"
            for connection in (new, kept):
                connection.sendall(request[60:])
            for connection in (new, kept):
                answer = until_closed(connection)
                assert answer.startswith(b"HTTP/1.1 200 ")
                assert b"connection: close" in answer
        assert server.process.wait(60) == 0


@pytest.mark.full
def test_idle_server_ends_at_once(tmp_path: Path) -> None:
    with live_server(tmp_path) as server:
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 0


def test_server_that_still_loads_can_be_ended(tmp_path: Path) -> None:
    with live_server(tmp_path, faults="fake,load_seconds=60", ready=False) as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


@pytest.mark.full
def test_request_beyond_the_window_ends_with_an_error_in_its_stream(tmp_path: Path) -> None:
    with live_server(tmp_path, "--drain-timeout", "0.3", faults=SLOW) as server:
        stream = Streaming(server.url, 2000)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 1
        lines = stream.ended()
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "unavailable"
        assert lines[-1] == "data: [DONE]"
        assert "requests cut off" in server.log_text


@pytest.mark.full
def test_second_signal_aborts_and_leaves_no_engine(tmp_path: Path) -> None:
    with live_server(tmp_path, "--drain-timeout", "60", faults=SLOW) as server:
        stream = Streaming(server.url, 2000)
        engines = children(server.process.pid)
        assert engines
        server.process.send_signal(signal.SIGTERM)
        until_draining(server)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 128 + signal.SIGTERM
        stream.ended()
        deadline = time.monotonic() + 60
        while any(Path(f"/proc/{pid}").exists() for pid in engines):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_port_in_use_is_one_clear_line(tmp_path: Path) -> None:
    with taken_port() as port:
        ran = serve(tmp_path, "--port", str(port))
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr == (
        f"ostro: Cannot listen on 127.0.0.1 port {port}: Address already in use. "
        "Choose another with --port; 0 is any free one.\n"
    )


def test_unknown_host_is_one_clear_line(tmp_path: Path) -> None:
    ran = serve(tmp_path, "--host", "no such host")
    assert (ran.returncode, len(ran.stderr.splitlines())) == (2, 1)
    assert ran.stderr.startswith("ostro: Cannot listen on 'no such host'")


def test_model_that_cannot_be_loaded_ends_the_server_with_one_clear_line(tmp_path: Path) -> None:
    ran = serve(tmp_path, "--port", "0", "--log-level", "warning", "./nowhere", faults="")
    assert (ran.returncode, ran.stdout) == (1, "")
    [line] = ran.stderr.splitlines()
    assert line.startswith("ostro: ")
    assert "nowhere" in line


def test_real_model_is_served_under_its_name(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny")
    args = (str(model), "--served-model-name", "mine,alias", "--served-model-name", "third")
    with live_server(tmp_path, *args, faults="") as server, server.client() as client:
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["mine", "alias", "third"]
        assert [client.get(f"/v1/models/{name}").json()["id"] for name in ("alias", "default")] == ["alias", "mine"]
        body = {"prompt": "the", "max_tokens": 4, "model": "alias", "ignore_eos": True}
        answer = client.post("/v1/completions", json=body)
    assert answer.json()["usage"]["completion_tokens"] == 4
    lines = [json.loads(line) for line in server.log_text.splitlines()]
    [line] = [line for line in lines if line.get("path") == "/v1/completions"]
    assert (line["status"], line["completion_tokens"]) == (200, 4)


@pytest.mark.full
def test_keys_admit_and_show_up_as_labels_only(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("from-file\n")
    args = ("--api-key-file", "keys")
    env = {"LEVANTER_API_KEY": "from-env,other", "OSTRO_ADMIN_KEY": "boss"}
    with live_server(tmp_path, *args, env=env) as server, server.client() as client:

        def status(path: str, key: str | None = None) -> int:
            answer = client.get(path, headers={"authorization": f"Bearer {key}"} if key else {})
            return int(answer.status_code)

        assert [status("/v1/models", key) for key in ("from-file", "from-env", "other", "boss")] == [200] * 4
        assert [status("/v1/models", key) for key in (None, "wrong")] == [401, 401]
        assert [status("/metrics"), status("/metrics", "other"), status("/no-such-path")] == [401, 200, 401]
        assert status("/healthz") == 200
        metrics = client.get("/metrics", headers={"authorization": "Bearer other"}).text
        assert "vllm:num_requests_running" in metrics
    log = server.log_text
    assert '"key": "key-' in log
    assert not any(key in log + metrics for key in ("from-file", "from-env", "boss"))


@pytest.mark.full
def test_cors_is_off_unless_asked_for_and_names_its_origins(tmp_path: Path) -> None:
    ask = {"origin": "https://page.example", "access-control-request-method": "POST"}
    with live_server(tmp_path, ready=False) as server, server.client() as client:
        assert "access-control-allow-origin" not in client.options("/v1/completions", headers=ask).headers
    args = ("--enable-cors", "--cors-origins", "https://page.example", "--api-key", "k")
    with live_server(tmp_path, *args, ready=False) as server, server.client() as client:
        allowed = client.options("/v1/completions", headers=ask)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://page.example")
        assert client.options("/v1/completions", headers={**ask, "origin": "https://evil.example"}).status_code == 400
        refused = client.get("/v1/models", headers={"origin": "https://page.example"})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://page.example")


def test_origins_alone_turn_cors_on(tmp_path: Path) -> None:
    ask = {"origin": "https://page.example", "access-control-request-method": "POST"}
    with (
        live_server(tmp_path, env={"AIOS_CORS_ORIGINS": "https://page.example"}, ready=False) as server,
        server.client() as client,
    ):
        allowed = client.options("/v1/completions", headers=ask)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://page.example")


@pytest.mark.full
def test_healthz_waits_for_the_model_if_configured(tmp_path: Path) -> None:
    args, faults = ("--healthz-waits-for-model",), "fake,load_seconds=6"
    with live_server(tmp_path, *args, faults=faults, ready=False) as server, server.client() as client:
        waiting = client.get("/healthz")
        assert (waiting.status_code, waiting.json()) == (503, {"status": "loading"})
        assert "retry-after" in waiting.headers
        while client.get("/readyz").status_code != 200:
            time.sleep(0.05)
        assert (client.get("/healthz").status_code, client.get("/healthz").json()) == (200, {"status": "ok"})


@pytest.mark.full
def test_a_default_seed_gives_the_same_request_the_same_answer(tmp_path: Path) -> None:
    body = {"prompt": "a", "max_tokens": 16, "temperature": 1, "ignore_eos": True}

    def texts(client: httpx.Client, path: str, body: dict[str, object]) -> set[str]:
        return {client.post(path, json=body).json()["choices"][0]["text"] for _ in range(3)}

    model = str(write_model(tmp_path / "tiny"))
    with live_server(tmp_path, model, "--seed", "7", faults="") as server, server.client() as client:
        [ours] = texts(client, "/v1/completions", body)
        [named] = texts(client, "/v1/completions", {**body, "seed": 7})
        assert ours == named
        assert texts(client, "/v1/completions", {**body, "seed": 8}) != {ours}
        native = {"prompts": ["a"], "max_tokens": 16, "temperature": 1}
        assert len({client.post("/generate", json=native).text for _ in range(3)}) == 1


@pytest.mark.full
def test_limits_of_other_servers_bound_what_they_name(tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "tiny"))
    args = (model, "--dry-run", "--max-running-tokens", "100", "--pages-per-seq", "3", "--cuda-graph-max-bs", "8")
    ran = serve(tmp_path, *args, "--device", "cpu", faults="")
    assert (ran.returncode, ran.stderr) == (0, "")
    report = {label: value.strip() for label, value in (line.split(":", 1) for line in ran.stdout.splitlines())}
    assert report["keys and values"] == "6 pages of 16 tokens"
    assert report["longest sequence"] == "48 tokens"


@pytest.mark.full
def test_a_single_model_server_answers_to_any_name_if_configured(tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "tiny"))
    body = {"prompt": "a", "max_tokens": 1, "model": "gpt-3.5-turbo"}
    with live_server(tmp_path, model) as server, server.client() as client:
        assert client.post("/v1/completions", json=body).status_code == 404
    with live_server(tmp_path, model, "--any-model-name", "--no-date-header") as server, server.client() as client:
        answer = client.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["model"]) == (200, "tiny")
        assert "date" not in answer.headers
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "model": "an odd name"}
        assert client.post("/v1/chat/completions", json=chat).status_code == 200
        # Whoever runs the server means what they say.
        assert client.post("/admin/unload/gpt-3.5-turbo").status_code == 404
        assert client.get("/v1/models/gpt-3.5-turbo").status_code == 404


def test_a_directory_of_models_that_does_not_exist_ends_the_start(tmp_path: Path) -> None:
    ran = serve(tmp_path, "--models", str(tmp_path / "typo"))
    assert ran.returncode != 0
    assert "there is no such directory" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.full
def test_any_model_may_have_further_names(tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "small", seed=1)
    first = str(write_model(tmp_path / "tiny"))
    args = (
        "--models",
        str(tmp_path / "models"),
        "--model-alias",
        "gpt-4o=default",
        "--model-alias",
        "gpt-4o-mini=small",
    )
    with live_server(tmp_path, first, *args) as server, server.client() as client:
        for name, meant in {"gpt-4o": "tiny", "gpt-4o-mini": "small", "small": "small"}.items():
            answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "model": name})
            assert (answer.status_code, answer.json()["model"]) == (200, meant)
        listed = {card["id"] for card in client.get("/v1/models").json()["data"]}
        assert listed == {"tiny", "gpt-4o", "small", "gpt-4o-mini"}
        assert client.get("/v1/models/gpt-4o-mini").json()["id"] == "gpt-4o-mini"


def test_answers_have_a_date_unless_told_otherwise(tmp_path: Path) -> None:
    with live_server(tmp_path, ready=False) as server, server.client() as client:
        assert "date" in client.get("/healthz").headers


@pytest.mark.full
def test_full_server_answers_429_with_retry_after(tmp_path: Path) -> None:
    args = ("--max-concurrent-requests", "1", "--max-queue-requests", "0")
    with live_server(tmp_path, *args, faults=SLOW) as server, server.client() as client:
        stream = Streaming(server.url, 20)
        refused = client.post("/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert stream.ended()[-1] == "data: [DONE]"


@pytest.mark.full
def test_timed_out_request_gets_504(tmp_path: Path) -> None:
    with live_server(tmp_path, env={"REQUEST_TIMEOUT": "0.3"}, faults=SLOW) as server, server.client() as client:
        late = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 500, "ignore_eos": True})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_printed_config_names_every_origin(tmp_path: Path) -> None:
    (tmp_path / "ostro.yaml").write_text("max_batch_size: 8\n")
    (tmp_path / ".env").write_text("MAX_CONCURRENT_REQUESTS=50\n")
    args = ("./model", "--config", "ostro.yaml", "--max-context-length", "512", "--print-config", "--api-key", "hush")
    ran = serve(tmp_path, *args, PORT="9000")
    assert (ran.returncode, ran.stderr) == (0, "")
    origins = {line.split(":")[0]: line.split("# ")[1] for line in ran.stdout.splitlines()}
    assert (origins["model"], origins["max_seq_len"]) == ("MODEL", "--max-context-length")
    assert (origins["port"], origins["max_concurrent_requests"]) == (
        "PORT in the environment",
        "MAX_CONCURRENT_REQUESTS in .env",
    )
    assert (origins["max_batch_seqs"], origins["host"]) == ("max_batch_size in ostro.yaml", "default")
    assert "hush" not in ran.stdout
    assert ran.stdout.endswith(": not on this machine yet\n")


@pytest.mark.full
def test_printed_config_says_what_will_run(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny")
    # Native kernels have pages of 16 tokens.
    wide = ("--page-size", "32")
    for args, told in {
        (str(model), *wide): "tiny: torch (cpu), float32 weights, float32 keys and values",
        (str(model), *wide, "--quantize", "int8"): "tiny: torch (cpu), int8 weights, float32 keys and values",
        (str(model), *wide, "--backend", "native"): "tiny: backend is native, which cannot run this model: ",
        ("./nowhere.gguf",): "nowhere: not on this machine yet",
    }.items():
        ran = serve(tmp_path, *args, "--device", "cpu", "--print-config")
        assert (ran.returncode, ran.stderr) == (0, "")
        assert f"# {told}" in ran.stdout.splitlines()[-1]


def test_dry_run_loads_reports_and_exits(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny")
    ran = serve(tmp_path, str(model), "--dry-run", "--kv-memory", "1M", faults="")
    assert (ran.returncode, ran.stderr) == (0, "")
    report = dict(line.split(":", 1) for line in ran.stdout.splitlines())
    assert (report["model"].strip(), report["longest sequence"].strip()) == ("tiny", "256 tokens")
    assert report["runs on"].strip().startswith(("native (", "torch (cpu)"))
    assert report["runs on"].endswith(" weights, float32 keys and values")
    assert {"keys and values", "memory of the engine", "load", "warm-up", "at a time"} <= report.keys()


def test_dry_run_of_a_bad_model_is_one_clear_line(tmp_path: Path) -> None:
    ran = serve(tmp_path, "./nowhere", "--dry-run", faults="")
    assert (ran.returncode, ran.stdout, len(ran.stderr.splitlines())) == (1, "", 1)


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("args", "status", "complaint"),
    [
        (("--port", "many"), 2, "port = 'many' (--port): Input should be a valid integer"),
        (("--max-batch-size", "1", "--max-num-seqs", "2"), 2, "--max-num-seqs sets what --max-batch-size has"),
        (("a=org/a", "--model", "a=org/b"), 2, "Two models are called 'a'"),
        (("--checkpoint-path", "x", "--model", "y"), 2, "exclude each other"),
        (("--trust-remote-code",), 2, "--trust-remote-code is not supported"),
        (("--device", "npu"), 2, "'auto', 'cpu', 'cuda', 'tpu' or 'mps'"),
        (("--tensor-parallel", "2", "--device", "cpu"), 1, "the model would run on one device"),
        (("--backend", "jax", "--quantize", "int8"), 1, "quantize does not work with JAX"),
        (("--no-such-flag",), 2, "unrecognized arguments: --no-such-flag"),
        (("--config", "nowhere.yaml"), 2, "Cannot read the config file nowhere.yaml"),
        (("--api-key-file", "nowhere"), 2, "Cannot read the key file nowhere"),
        (("--logging-config", "nowhere"), 2, "Cannot read the logging config nowhere"),
        (("--enable-cors", "--allow-credentials"), 2, "needs origins by name"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    tmp_path: Path, args: tuple[str, ...], status: int, complaint: str
) -> None:
    ran = serve(tmp_path, *args)
    assert (ran.returncode, ran.stdout) == (status, "")
    assert complaint in ran.stderr.splitlines()[-1]


def test_switch_does_not_swallow_the_model(tmp_path: Path) -> None:
    ran = serve(tmp_path, "--no-prefix-caching", "./model", "--print-config")
    assert 'model: ["./model"]' in ran.stdout
    assert "prefix_caching: false" in ran.stdout


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_server_takes_as_many_open_files_as_it_may(tmp_path: Path) -> None:
    """1024 files is what shells give; more requests than that may wait, and theirs are not the only files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
    try:
        with live_server(tmp_path, ready=False, cold=True) as server:
            limits = Path(f"/proc/{server.process.pid}/limits").read_text()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    [line] = [line for line in limits.splitlines() if line.startswith("Max open files")]
    assert int(line.split()[3]) == min(before[1], 65536)
