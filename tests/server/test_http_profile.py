"""POST /admin/profile of a real server."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from live_server import LiveServer, live_server
from model_directory import write_model
from traces import named, read_spans
from warm_start import warm_run


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = tmp_path_factory.mktemp("server")
    model = write_model(directory / "tiny")
    args = (str(model), "--threads", "1", "--device", "cpu", "--profile", "traces", "--admin-key", "boss")
    with live_server(directory, *args, faults="") as live:
        yield live


@pytest.fixture
def boss(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client(authorization="Bearer boss") as client:
        yield client


def test_profile_of_a_busy_engine_shows_its_steps(server: LiveServer, boss: httpx.Client) -> None:
    with server.client() as client, ThreadPoolExecutor(1) as threads:
        profile = threads.submit(boss.post, "/admin/profile", json={"max_steps": 5, "seconds": 60})
        while not profile.done():
            body = {"prompt": "the quick", "max_tokens": 8, "ignore_eos": True}
            assert client.post("/v1/completions", json=body).status_code == 200
    answer = profile.result()
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert (told["model"], told["steps"]) == ("tiny", 5)
    path = Path(told["path"])
    assert path.parent == server.log.parent / "traces"
    spans = read_spans(path)
    launches = named(spans, "launch")
    assert len(launches) == 5
    for launch in launches:
        assert any(launch.holds(span) for span in spans if span is not launch), "what the runner did"


def test_profile_of_an_idle_engine_ends_in_time_and_is_empty(boss: httpx.Client) -> None:
    told = boss.post("/admin/profile", json={"seconds": 0.1}).json()
    assert told["steps"] == 0
    assert read_spans(Path(told["path"])) == []


@pytest.mark.parametrize(("field", "value"), [("seconds", 61), ("seconds", 0), ("max_steps", 0), ("model", "nobody")])
def test_bad_requests_are_refused_by_name(boss: httpx.Client, field: str, value: object) -> None:
    refused = boss.post("/admin/profile", json={field: value})
    assert refused.status_code == (404 if field == "model" else 400)
    assert refused.json()["error"]["param"] == field


def test_profiles_need_the_admin_key(server: LiveServer) -> None:
    with server.client() as client:
        assert client.post("/admin/profile", json={}).status_code == 401


@pytest.mark.full
def test_profiles_without_a_directory_are_refused(tmp_path: Path) -> None:
    with live_server(tmp_path) as server, server.client() as client:
        refused = client.post("/admin/profile", json={})
        assert refused.status_code == 403
        assert "--profile DIR" in refused.json()["error"]["message"]


def test_profile_directory_that_is_a_file_is_refused_at_startup(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = warm_run(["serve", "--profile", str(tmp_path / "file")], cwd=tmp_path, environment={"OSTRO_FAULTS": "fake"})
    assert ended.returncode != 0
    assert "not a directory" in ended.stderr
