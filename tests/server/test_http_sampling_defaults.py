"""A model's own sampling defaults, over HTTP and by commands: on every endpoint, under the operator's word, shown."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from live_server import LiveServer, live_server
from model_directory import write_model
from warm_start import warm_run

SAY = [{"role": "user", "content": "the fox"}]
ENDPOINTS: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": SAY},
    "/v1/completions": {"prompt": "the fox"},
    "/generate": {"prompts": ["the fox"]},
    "/generate_stream": {"prompts": ["the fox"]},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its file asks for greedy decoding, which can be told from draws."""
    directory = write_model(tmp_path_factory.mktemp("defaults") / "model")
    (directory / "generation_config.json").write_text(json.dumps({"do_sample": False, "max_new_tokens": 40}))
    return directory


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[LiveServer]:
    with live_server(model.parent, str(model), "--threads", "1", faults="") as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def text(client: httpx.Client, path: str, **fields: object) -> str:
    response = client.post(path, json=ENDPOINTS[path] | {"max_tokens": 24} | fields)
    assert response.status_code == 200, response.text
    if path == "/generate_stream":
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        return "".join(event.get("text", "") for event in events)
    body = response.json()
    if path == "/generate":
        return str(body["completions"][0])
    choice = body["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_silent_request_gets_the_models_defaults(client: httpx.Client, path: str) -> None:
    assert text(client, path) == text(client, path, temperature=0) == text(client, path, temperature=None)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_requests_own_value_wins(client: httpx.Client, path: str) -> None:
    assert len({text(client, path, temperature=1.0, seed=seed) for seed in range(3)}) == 3


def test_a_chat_without_a_limit_ends_at_the_models_number(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", json={"messages": SAY, "temperature": 1, "seed": 4}).json()
    assert answer["usage"]["completion_tokens"] <= 40
    named = client.post(
        "/v1/chat/completions", json={"messages": SAY, "max_tokens": 50, "min_tokens": 50, "seed": 4}
    ).json()
    assert named["usage"]["completion_tokens"] == 50


def test_the_list_of_models_shows_what_applies(client: httpx.Client) -> None:
    [card] = client.get("/v1/models").json()["data"]
    assert card["sampling_defaults"] == {"temperature": 0.0, "max_tokens": 40}


@pytest.mark.full
def test_operator_defaults_override_the_models(model: Path, tmp_path: Path) -> None:
    args = (str(model), "--threads", "1", "--default-temperature", "1", "--default-max-tokens", "9")
    with live_server(tmp_path, *args, faults="") as live, live.client() as client:
        assert len({text(client, "/generate", seed=seed) for seed in range(3)}) == 3
        for path in ("/v1/chat/completions", "/v1/completions"):
            answer = client.post(path, json=ENDPOINTS[path] | {"temperature": 0, "min_tokens": 9}).json()
            assert answer["usage"]["completion_tokens"] == 9
        [card] = client.get("/v1/models").json()["data"]
        assert card["sampling_defaults"] == {"temperature": 1.0, "max_tokens": 9}


@pytest.mark.full
def test_no_default_is_shown_that_a_request_could_not_ask_for(model: Path, tmp_path: Path) -> None:
    told = ostro(tmp_path, "serve", str(model), "--max-new-tokens", "7", "--print-config")
    assert "; default sampling: temperature 0.0, max_tokens 7\n" in told
    with live_server(tmp_path, str(model), "--max-new-tokens", "7", faults="") as live, live.client() as client:
        [card] = client.get("/v1/models").json()["data"]
        assert card["sampling_defaults"] == {"temperature": 0.0, "max_tokens": 7}
        answer = client.post("/v1/chat/completions", json={"messages": SAY, "min_tokens": 7}).json()
        assert answer["usage"]["completion_tokens"] == 7


@pytest.mark.full
def test_the_file_can_be_ignored(model: Path, tmp_path: Path) -> None:
    with live_server(tmp_path, str(model), "--generation-config", "ignore", faults="") as live, live.client() as client:
        assert len({text(client, "/v1/completions", seed=seed) for seed in range(3)}) == 3
        assert text(client, "/v1/completions", seed=1) == text(client, "/v1/completions", seed=1, temperature=1)
        assert text(client, "/generate", seed=1) == text(client, "/generate", seed=1, temperature=0.7)
        [card] = client.get("/v1/models").json()["data"]
        assert card["sampling_defaults"] == {}


def test_a_model_that_is_not_loaded_shows_its_defaults_when_asked_for_alone(model: Path, tmp_path: Path) -> None:
    """Clients choose their own sampling for models that recommend none, from the first message on."""
    silent = write_model(model.parent / "silent")
    args = ("--models", str(model.parent), "--default-max-tokens", "9", "--threads", "1")
    with live_server(tmp_path, *args, faults="") as live, live.client() as client:
        cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
        assert [cards[name]["sampling_defaults"] for name in ("model", silent.name)] == [None, None]
        alone = {name: client.get(f"/v1/models/{name}").json() for name in ("model", silent.name)}
        assert alone["model"] == cards["model"] | {"sampling_defaults": {"temperature": 0.0, "max_tokens": 9}}
        assert alone[silent.name]["sampling_defaults"] == {"max_tokens": 9}
        (silent / "config.json").write_text("{")
        assert client.get(f"/v1/models/{silent.name}").json()["sampling_defaults"] is None


def ostro(directory: Path, *args: str, **env: str) -> str:
    done = warm_run(args, cwd=directory, environment={**os.environ, **env})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_print_config_shows_what_a_silent_request_gets(model: Path, tmp_path: Path) -> None:
    told = ostro(tmp_path, "serve", str(model), "--default-temperature", "0.5", "--print-config")
    assert 'generation_config: "auto"' in told
    assert "; default sampling: temperature 0.5, max_tokens 40\n" in told
    ignored = ostro(tmp_path, "serve", str(model), "--print-config", OSTRO_GENERATION_CONFIG="ignore")
    assert 'generation_config: "ignore"' in ignored
    assert "default sampling" not in ignored


def test_the_default_models_own_defaults_match_its_card(tmp_path: Path) -> None:
    told = ostro(tmp_path, "serve", "--print-config")
    assert "; default sampling: temperature 0.2, top_p 0.5, max_tokens 1024\n" in told


@pytest.mark.full
def test_the_commands_take_the_models_defaults(model: Path, tmp_path: Path) -> None:
    generate = ("generate", "--model", str(model), "--threads", "1", "the fox", "--max-tokens", "24")
    greedy = ostro(tmp_path, *generate, "--temperature", "0")
    assert ostro(tmp_path, *generate) == greedy
    assert ostro(tmp_path, *generate, "--generation-config", "ignore", "--seed", "3") != greedy
    body = {"prompt": "the fox", "max_tokens": 24}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "batch.jsonl").write_text(json.dumps(line))
    batch = json.loads(ostro(tmp_path, "batch", "batch.jsonl", "--model", str(model), "--threads", "1"))
    assert batch["response"]["body"]["choices"][0]["text"] + "\n" == greedy
