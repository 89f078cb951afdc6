"""Models straight from a bucket, a real store behind it, in real processes."""

import json
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from live_server import LiveServer, live_server
from model_directory import pickle_weights, write_model
from object_stores import BUCKET, CREDENTIALS, ObjectStore, running_store
from torch_blocker import without_torch

from ostro.backends.planning import plan
from ostro.config import EngineConfig


def put(store: ObjectStore, name: str, directory: Path) -> None:
    store.put_model(f"models/{name}", {path.name: path.read_bytes() for path in directory.iterdir()})


@pytest.mark.parametrize("scheme", ["gs", pytest.param("s3", marks=pytest.mark.slow)])
def test_models_of_a_bucket_are_served_and_need_no_network_the_second_time(scheme: str, tmp_path: Path) -> None:
    with ExitStack() as stores:
        store = stores.enter_context(running_store("gs" if scheme == "gs" else "s3"))
        for seed, name in enumerate(("one", "org/two")):
            put(store, name, write_model(tmp_path / name, seed=seed))
        put(store, "pickled", pickle_weights(write_model(tmp_path / "pickled", seed=0), num_files=2))
        store.put_model("models/weightless", {"config.json": (tmp_path / "one" / "config.json").read_bytes()})
        bucket = {"GCS_BUCKET": BUCKET} if scheme == "gs" else {"OSTRO_MODELS": f"s3://{BUCKET}/models/"}
        environment = {**store.environment(store.url), **bucket, "OSTRO_CACHE": str(tmp_path / "cache")}
        with live_server(tmp_path, "--threads", "1", faults="", env=environment) as live, live.client() as client:
            listed = client.get("/v1/models").json()["data"]
            names = ("one", "org/two", "pickled")
            assert {card["id"]: card["state"] for card in listed} == dict.fromkeys((*names, "weightless"), "available")
            texts = {}
            for name in names:
                body = {"model": name, "prompt": "the dog", "max_tokens": 4, "temperature": 0}
                answer = client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                texts[name] = answer.json()["choices"][0]["text"]
                # Its own name, not that of a directory in the cache.
                assert client.get(f"/v1/models/{name}").json()["root"] == name
            assert texts["pickled"] == texts["one"]
            never = client.post("/v1/completions", json={**body, "model": "weightless"})
            assert never.status_code == 503
            assert "lacks weights (model.safetensors, a GGUF file or pytorch_model.bin)" in never.text
            assert BUCKET not in never.text
            assert client.post("/admin/unload/one").json()["state"] == "available"
            # The bucket is gone, and what was fetched from it is still here.
            stores.close()
            again = client.post("/v1/completions", json={**body, "model": "one"})
            assert again.json()["choices"][0]["text"] == texts["one"]
            missing = client.post("/v1/completions", json={**body, "model": "three"})
            assert missing.status_code in (404, 502)


@pytest.mark.full
def test_pickles_of_a_bucket_are_served_where_torch_is_missing(tmp_path: Path) -> None:
    """As in the `cpu` image, and in what `scripts/run_server.sh` installs."""
    model = pickle_weights(write_model(tmp_path / "model"), num_files=2)
    with running_store("gs") as store:
        put(store, "pickled", model)
        environment = {**store.environment(store.url), "GCS_BUCKET": BUCKET, "OSTRO_CACHE": str(tmp_path / "cache")}
        environment |= without_torch(tmp_path)
        with live_server(tmp_path, "--threads", "1", faults="", env=environment) as live, live.client() as client:
            body = {"model": "pickled", "prompt": "the dog", "max_tokens": 4, "ignore_eos": True}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 4


@pytest.fixture
def silent_store() -> Iterator[dict[str, str]]:
    """The environment that leads to a store which takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield CREDENTIALS | {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{server.getsockname()[1]}"}


def ended(live: LiveServer) -> int:
    """Its exit status after a signal. It has much less time than the store's client has patience."""
    live.process.send_signal(signal.SIGTERM)
    return live.process.wait(20)


@pytest.mark.full
def test_a_bucket_that_does_not_answer_holds_up_nobody(tmp_path: Path, silent_store: dict[str, str]) -> None:
    """The list of models waited for it for minutes, and so did the end of the server."""
    first = write_model(tmp_path / "first")
    args = (str(first), "--models", f"gs://{BUCKET}/models/", "--threads", "1")
    with live_server(tmp_path, *args, env=silent_store) as live, live.client() as client:
        listed = client.get("/v1/models").json()["data"]
        assert {card["id"]: card["state"] for card in listed} == {"first": "ready"}
        assert client.post("/v1/completions", json={"prompt": "the dog", "max_tokens": 2}).status_code == 200
        assert ended(live) == 0


@pytest.mark.full
def test_a_model_being_fetched_is_reported_and_takes_no_place(tmp_path: Path, silent_store: dict[str, str]) -> None:
    tiny = write_model(tmp_path / "tiny")
    env = silent_store | {"OSTRO_CACHE": str(tmp_path / "cache")}
    args = ("--model", f"tiny={tiny}", "--model", f"far=gs://{BUCKET}/models/far", "--max-models", "1")
    with live_server(tmp_path, *args, "--load-timeout", "2", env=env) as live, live.client() as client:
        answer = client.post("/v1/completions", json={"model": "far", "prompt": "the dog"})
        assert answer.status_code == 503
        assert "still being fetched" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) >= 1
        states = {card["id"]: card["state"] for card in client.get("/v1/models").json()["data"]}
        assert states == {"tiny": "ready", "far": "fetching"}
        stats = {each["id"]: each for each in client.get("/admin/stats").json()["models"]}
        assert (stats["far"]["state"], stats["far"]["bytes"], stats["tiny"]["evictions"]) == ("fetching", 0, 0)
        answer = client.post("/v1/completions", json={"model": "tiny", "prompt": "the dog", "max_tokens": 2})
        assert answer.status_code == 200
        assert client.post("/admin/unload/far").json()["state"] == "available"
        assert ended(live) == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def until_alive(client: httpx.Client) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(httpx.ConnectError):
            client.get("/healthz")
            return
        time.sleep(0.05)
    raise AssertionError("the server did not start")


@pytest.mark.full
def test_a_server_of_one_model_is_loading_while_that_is_fetched(tmp_path: Path, silent_store: dict[str, str]) -> None:
    env = silent_store | {"OSTRO_CACHE": str(tmp_path / "cache")}
    reference = f"gs://{BUCKET}/models/far"
    with live_server(tmp_path, reference, env=env, ready=False, port=free_port()) as live, live.client() as client:
        until_alive(client)
        for _ in range(5):
            answer = client.get("/readyz")
            assert (answer.status_code, answer.json()) == (503, {"status": "loading"})
            time.sleep(0.2)
        assert client.get("/healthz").status_code == 200
        assert ended(live) == 0


@pytest.mark.full
def test_models_larger_than_the_budget_together_are_never_loaded_together(tmp_path: Path) -> None:
    """What came from a bucket counted as nothing until it was loaded."""
    with running_store("gs") as store:
        for seed, name in enumerate(("one", "two")):
            put(store, name, write_model(tmp_path / name, seed=seed))
        environment = {**store.environment(store.url), "GCS_BUCKET": BUCKET, "OSTRO_CACHE": str(tmp_path / "cache")}
        # Enough for one, whatever runs it here, and too little for two.
        budget = plan(tmp_path / "one", EngineConfig(kv_memory=1 << 20, threads=1)).total_bytes * 3 // 2
        args = ("--threads", "1", "--memory-budget", str(budget), "--kv-memory", "1M", "--max-models", "9")
        with live_server(tmp_path, *args, faults="", env=environment, cold=True) as live, live.client() as client:
            for name in ("one", "two"):
                body = {"model": name, "prompt": "the dog", "max_tokens": 2}
                answer = client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
        log = [json.loads(line) for line in live.log_text.splitlines() if line.startswith("{")]
    said = [(line["message"], line.get("model")) for line in log]
    # Known from its files, two made room before it was loaded, not after.
    [made_room] = [number for number, (message, _) in enumerate(said) if message == "one was evicted to make room."]
    assert made_room < said.index(("ready", "two"))
    assert "does not fit" not in str(said)
