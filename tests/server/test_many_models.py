"""Many models behind one server, in real processes: found, loaded on first use, evicted, refused."""

import asyncio
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from live_server import LiveServer, live_server
from live_service import live_models, set_faults
from model_directory import make_embedding_model, write_model
from peft_directory import random_adapter

from ostro.torch_models.build import build_model

NAMES = ("alpha", "org/beta", "org-gamma")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(NAMES):
        write_model(root / name, seed=seed)
    broken = write_model(root / "broken")
    (broken / "model.safetensors").write_bytes(b"no tensors")
    return root


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = tmp_path_factory.mktemp("server")
    config = directory / "ostro.yaml"
    config.write_text("model_settings: {alpha: {max_seq_len: 64}}")
    args = ("--models", str(models), "--max-models", "2", "--threads", "1", "--config", str(config))
    with live_server(directory, *args, "--admin-key", "boss", faults="") as live:
        yield live


def complete(client: httpx.Client, model: str, prompt: str = "the quick") -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": 6, "temperature": 0}
    return client.post("/v1/completions", json=body)


def states(client: httpx.Client) -> dict[str, str]:
    return {card["id"]: card["state"] for card in client.get("/v1/models").json()["data"]}


def test_models_come_when_asked_for_and_the_least_recently_used_goes(server: LiveServer) -> None:
    with server.client(authorization="Bearer boss") as client:
        assert states(client) == dict.fromkeys(["alpha", "broken", *NAMES[1:]], "available")
        answers = {}
        for name in NAMES[:2]:
            answer = complete(client, name)
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == name
            answers[name] = answer.json()["choices"][0]["text"]
        assert len(set(answers.values())) == 2, "different weights, different texts"
        assert complete(client, "alpha").status_code == 200
        assert complete(client, "org-gamma").status_code == 200
        found = states(client)
        assert (found["alpha"], found["org/beta"], found["org-gamma"]) == ("ready", "available", "ready")
        assert complete(client, "org/beta").json()["choices"][0]["text"] == answers["org/beta"]
        stats = client.get("/admin/stats").json()
        told = {each["id"]: each for each in stats["models"]}
        assert (stats["loads"], stats["evictions"]) == (4, 2)
        assert told["org/beta"]["loads"] == 2
        assert told["org/beta"]["bytes"] > 1 << 20
        card = client.get("/v1/models/alpha").json()
        assert (card["max_model_len"], card["backend"], card["precision"]) == (None, None, None)
        assert client.get("/readyz").json() == {"status": "ready"}


def test_other_spellings_of_a_name_and_the_path_find_the_model(server: LiveServer) -> None:
    with server.client() as client:
        assert complete(client, "org/gamma").json()["model"] == "org-gamma"
        body = {"messages": [{"role": "user", "content": "the dog"}], "max_tokens": 3}
        answer = client.post("/v1/org/beta/chat/completions", json=body)
        assert answer.json()["model"] == "org/beta"
        answer = client.post("/v1/org-beta/completions", json={"prompt": "the dog", "max_tokens": 3})
        assert answer.json()["model"] == "org/beta"


@pytest.mark.parametrize("name", ["nobody", "../alpha", "org/beta/x", "", "alpha\n", "ALPHA", "a" * 500])
def test_unknown_model_is_a_404(server: LiveServer, name: str) -> None:
    with server.client() as client:
        answer = complete(client, name)
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"


def test_a_request_must_name_one_of_several_models(server: LiveServer) -> None:
    with server.client() as client:
        answer = client.post("/v1/completions", json={"prompt": "the dog"})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "model"


def test_a_broken_model_is_reported_and_the_others_go_on(server: LiveServer, models: Path) -> None:
    with server.client(authorization="Bearer boss") as client:
        first, second = complete(client, "broken"), complete(client, "broken")
        assert first.status_code == second.status_code == 500
        assert first.json()["error"]["message"].startswith("model.safetensors is damaged or not a safetensors file")
        [told] = [each for each in client.get("/admin/stats").json()["models"] if each["id"] == "broken"]
        assert (told["state"], told["loads"]) == ("failed", 0)
        assert str(models / "broken" / "model.safetensors") in told["failure"]
        assert complete(client, "alpha").status_code == 200


@pytest.mark.full
def test_a_listed_model_that_cannot_be_loaded_is_no_fault_of_the_client(tmp_path: Path) -> None:
    """It was called unknown, and the answer named the files of the server; then it did not say what was wrong."""
    root = tmp_path / "models"
    write_model(root / "weightless")
    (root / "weightless" / "model.safetensors").unlink()
    write_model(root / "wordless")
    (root / "wordless" / "tokenizer.json").unlink()
    write_model(root / "long")
    write_model(root / "odd")
    odd = json.loads((root / "odd" / "config.json").read_text()) | {"architectures": ["OddForCausalLM"]}
    (root / "odd" / "config.json").write_text(json.dumps(odd))
    write_model(root / "unsafe")
    (root / "unsafe" / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Path("/srv/it")}, root / "unsafe" / "pytorch_model.bin")
    config = tmp_path / "ostro.yaml"
    config.write_text("model_settings: {long: {max_seq_len: 9999}}")
    reasons = {
        "weightless": (503, "weightless holds no weights that Ostro reads: model.safetensors, pytorch_model.bin"),
        "odd": (500, "OddForCausalLM"),
        "unsafe": (500, "pytorch_model.bin holds more than tensors, or is damaged, and is not loaded for safety"),
        "wordless": (503, "There is no tokenizer.json"),
        "long": (500, "max_seq_len is 9999"),
    }
    args = ("--models", str(root), "--threads", "1", "--config", str(config))
    with live_server(tmp_path, *args, faults="") as live, live.client() as client:
        for name, (status, reason) in reasons.items():
            answer = complete(client, name)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, "model_error"), answer.text
            assert reason in answer.json()["error"]["message"]
            assert str(tmp_path) not in answer.text
            [told] = [each for each in client.get("/admin/stats").json()["models"] if each["id"] == name]
            assert reason in told["failure"]
            while reason not in live.log_text:
                time.sleep(0.05)


def test_a_model_has_settings_of_its_own(server: LiveServer) -> None:
    with server.client() as client:
        assert complete(client, "alpha").status_code == 200
        card = client.get("/v1/models/alpha").json()
        assert card["max_model_len"] == 64
        assert card["backend"].startswith(("native (", "torch (cpu)"))
        assert card["precision"].endswith(" weights, float32 keys and values")
        assert complete(client, "alpha", "the dog " * 60).json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.full
def test_an_operator_loads_unloads_and_pins(server: LiveServer) -> None:
    with server.client(authorization="Bearer boss") as client:
        assert client.post("/admin/load/org/beta").json()["state"] == "ready"
        assert client.post("/admin/unload/org-beta").json()["state"] == "available"
        assert client.post("/admin/pin/org/beta").json()["pinned"] is True
        for name in ("alpha", "org-gamma", "alpha"):
            assert complete(client, name).status_code == 200
            assert states(client)["org/beta"] == "ready"
        assert client.post("/admin/unpin/org/beta").json()["pinned"] is False
        assert client.post("/admin/load/nobody").status_code == 404
    with server.client() as anybody:
        assert anybody.post("/admin/unload/alpha").status_code == 401
        assert anybody.get("/admin/stats").status_code == 401


@pytest.mark.full
def test_requests_for_all_models_at_once_are_all_answered(server: LiveServer) -> None:
    prompts = ("the quick", "brown fox", "the lazy dog")
    with server.client() as client:
        expected = {
            (name, prompt): complete(client, name, prompt).json()["choices"][0]["text"]
            for name in NAMES
            for prompt in prompts
        }
    dice = random.Random(1)
    asked = [dice.choice(list(expected)) for _ in range(60)]

    async def all_at_once() -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=60) as client:

            async def one(model: str, prompt: str) -> str:
                body = {"model": model, "prompt": prompt, "max_tokens": 6, "temperature": 0}
                answer = await client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                return str(answer.json()["choices"][0]["text"])

            return await asyncio.gather(*(one(*each) for each in asked))

    assert asyncio.run(all_at_once()) == [expected[each] for each in asked]


def test_metrics_tell_the_models_apart(server: LiveServer) -> None:
    with server.client(authorization="Bearer boss") as client:
        complete(client, "alpha")
        complete(client, "org-gamma")
        text = client.get("/metrics").text
    assert 'vllm:generation_tokens_total{model_name="alpha"}' in text
    assert 'vllm:generation_tokens_total{model_name="org-gamma"}' in text
    assert "ostro_models_loaded 2.0" in text


@pytest.mark.full
def test_totals_survive_the_end_of_an_engine(models: Path, tmp_path: Path) -> None:
    """Counts since the last look were lost with the engine, and /admin/stats lost all of them."""
    sampled, restarts = "ostro_sampled_tokens_total", "ostro_engine_restarts_total"
    args = ("--models", str(models), "--threads", "1")
    with live_server(tmp_path, *args) as live, live.client() as client:

        def counted(name: str) -> float:
            [line] = [
                line
                for line in client.get("/metrics").text.splitlines()
                if line.startswith(f'{name}{{model_name="alpha"')
            ]
            return float(line.rpartition(" ")[2])

        def told() -> dict[str, int]:
            [stats] = [each for each in client.get("/admin/stats").json()["models"] if each["id"] == "alpha"]
            return {name: stats[name] for name in ("requests_total", "generated_tokens", "restarts")}

        assert told() == {"requests_total": 0, "generated_tokens": 0, "restarts": 0}
        for loads in (1, 2):
            for _ in range(2):
                body = {"model": "alpha", "prompt": "the quick", "max_tokens": 6, "ignore_eos": True}
                assert client.post("/v1/completions", json=body).status_code == 200
            client.post("/admin/unload/alpha").raise_for_status()
            assert (counted(sampled), counted(restarts)) == (12 * loads, 0)
            assert told() == {"requests_total": 2 * loads, "generated_tokens": 12 * loads, "restarts": 0}


@pytest.mark.full
def test_queued_requests_hold_no_model(models: Path, tmp_path: Path) -> None:
    """A queue for one model kept it loaded until the last of them was served, and those for another had a 503."""
    args = ("--models", str(models), "--max-models", "1", "--max-concurrent-requests", "1", "--threads", "1")

    async def scenario(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:

            async def ask(model: str) -> tuple[int, str]:
                body = {"model": model, "prompt": "the quick", "max_tokens": 6, "temperature": 0}
                answer = await client.post("/v1/completions", json=body)
                return answer.status_code, answer.json()["choices"][0]["text"]

            async def stats() -> tuple[int, dict[str, dict[str, object]]]:
                told = (await client.get("/admin/stats")).json()
                return told["waiting"], {each["id"]: each for each in told["models"]}

            expected = await ask("alpha")
            endless = {"model": "alpha", "prompt": "the", "max_tokens": 8000, "ignore_eos": True, "stream": True}
            async with client.stream("POST", "/v1/completions", json=endless) as stream:
                lines = stream.aiter_lines()
                await anext(lines)
                in_line = [asyncio.create_task(ask("alpha")) for _ in range(3)]
                while (await stats())[0] < 3:
                    await asyncio.sleep(0.02)
                assert (await stats())[1]["alpha"]["requests"] == 1
                other = asyncio.create_task(ask("org-gamma"))
                while (await stats())[1]["alpha"]["state"] != "draining":
                    await asyncio.sleep(0.02)
            assert (await other)[0] == 200
            assert await asyncio.gather(*in_line) == [expected] * 3
            assert (await stats())[1]["alpha"]["loads"] == 2

    with live_server(tmp_path, *args, faults="fake,step_seconds=0.02") as live:
        asyncio.run(asyncio.wait_for(scenario(live.url), 60))


@pytest.mark.full
def test_a_ready_model_is_available_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose turn it is gives that up when the model does not come before anything else can run."""
    set_faults(monkeypatch)

    async def scenario() -> None:
        async with live_models() as (models, _):
            waited: list[bool] = []
            asyncio.get_running_loop().call_soon(waited.append, True)
            async with models.use("default"):
                assert not waited

    asyncio.run(scenario())


@pytest.mark.full
def test_named_models_the_first_of_which_answers_by_default(models: Path, tmp_path: Path) -> None:
    args = (str(models / "alpha"), "--model", f"tiny={models / 'org-gamma'}", "--pin", "tiny", "--threads", "1")
    env = {"DEFAULT_MAX_TOKENS": "3", "DEFAULT_TEMPERATURE": "0"}
    with live_server(tmp_path, *args, faults="", env=env) as live, live.client() as client:
        assert set(states(client)) == {"alpha", "tiny"}
        assert states(client)["tiny"] == "ready"
        answer = client.post("/v1/completions", json={"prompt": "the dog"}).json()
        assert answer["model"] == "alpha"
        assert answer["usage"]["completion_tokens"] == 3
        again = client.post("/v1/completions", json={"prompt": "the dog"}).json()
        assert again["choices"][0]["text"] == answer["choices"][0]["text"]


@pytest.mark.full
def test_the_first_model_keeps_its_name_and_the_server_stays_ready_while_models_take_turns(tmp_path: Path) -> None:
    """A model that nobody had named was called after its file only while it was loaded: then the name was nobody's, or
    another model's. And each time that it was loaded again, balancers took the server out.
    """
    first = write_model(tmp_path / "first")
    (first / "model.safetensors").rename(first / "beta.safetensors")
    for name in ("beta", "other"):
        write_model(tmp_path / "place" / name)
    place = str(tmp_path / "place")
    args = (str(first / "beta.safetensors"), "--models", place, "--pin", "nobody", "--max-models", "1")
    with live_server(tmp_path, *args, faults="fake,load_seconds=0.5") as live, live.client() as client:
        seen = []
        for name in ("beta", "other", "beta", "default"):
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(complete, client, name)
                while not answer.done():
                    seen.append(client.get("/readyz").status_code)
            assert answer.result().json()["model"] == ("beta" if name == "default" else name)
            assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["beta", "other"]
        assert set(seen) == {200}
    lines = [json.loads(line)["message"] for line in live.log_text.splitlines()]
    assert any("name a model that does not exist" in line and "'nobody'" in line for line in lines)


@pytest.mark.full
def test_models_under_a_place_that_are_pinned_come_before_the_server_is_ready(models: Path, tmp_path: Path) -> None:
    args = ("--models", str(models), "--pin", "broken,org/gamma", "--load-timeout", "0.2", "--threads", "1")
    with live_server(tmp_path, *args, faults="") as live, live.client() as client:
        found = states(client)
        assert (found["broken"], found["org-gamma"], found["alpha"]) == ("failed", "ready", "available")


@pytest.mark.full
def test_a_model_whose_adapter_cannot_be_loaded_ends_the_server_as_any_that_is_alone(
    models: Path, tmp_path: Path
) -> None:
    """It stayed, said that it was ready, and had no model for anybody."""
    args = (str(models / "alpha"), "--lora", f"french={tmp_path / 'nowhere'}", "--threads", "1")
    with live_server(tmp_path, *args, faults="", ready=False) as live:
        assert live.process.wait(30) == 1
        assert "which should hold an adapter" in live.log_text


def test_each_load_is_logged_in_one_line(server: LiveServer) -> None:
    with server.client() as client:
        complete(client, "alpha")
    lines = [json.loads(line) for line in server.log_text.splitlines()]
    assert {"alpha", "org/beta"} <= {line.get("model") for line in lines if line["message"] == "ready"}
    assert any(line["message"] == "the model cannot be served" and line["model"] == "broken" for line in lines)


@pytest.mark.full
def test_adapters_are_served_under_their_own_names_beside_their_base(models: Path, tmp_path: Path) -> None:
    base = models / "alpha"
    shape = build_model(json.loads((base / "config.json").read_text()), dtype=torch.float32)
    for seed, name in enumerate(("french", "german")):
        random_adapter(tmp_path / name, shape, seed=seed)
    loras = [word for name in ("french", "german") for word in ("--lora", f"{name}={tmp_path / name}")]
    with live_server(tmp_path, str(base), *loras, "--threads", "1", faults="") as live, live.client() as client:
        cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
        assert {name: card["parent"] for name, card in cards.items()} == {
            "alpha": None,
            "french": "alpha",
            "german": "alpha",
        }
        texts = {}
        for name in cards:
            answer = complete(client, name).json()
            assert answer["model"] == name
            texts[name] = answer["choices"][0]["text"]
        assert len(set(texts.values())) == 3
        # Asked again, from the cache of prefixes: nobody has another's keys.
        prompt = "the quick brown fox " * 8
        firsts = {name: complete(client, name, prompt).json() for name in texts}
        again = {name: complete(client, name, prompt).json() for name in texts}
        for name in texts:
            assert firsts[name]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert again[name]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            assert again[name]["choices"][0]["text"] == firsts[name]["choices"][0]["text"]
        assert len({answer["choices"][0]["text"] for answer in again.values()}) == 3
        stats = {each["id"]: each for each in client.get("/admin/stats").json()["models"]}
        assert (stats["alpha"]["loads"], stats["french"]["bytes"]) == (1, 0)
        assert {name: each["requests_total"] for name, each in stats.items()} == dict.fromkeys(texts, 3)
        assert all(0 < each["cached_tokens"] < each["prompt_tokens"] for each in stats.values())


@pytest.mark.full
def test_an_adapter_has_vectors_of_its_own(tmp_path: Path) -> None:
    base = make_embedding_model(write_model(tmp_path / "embedder"))
    shape = build_model(json.loads((base / "config.json").read_text()), dtype=torch.float32)
    random_adapter(tmp_path / "tuned", shape)
    args = (str(base), "--lora", f"tuned={tmp_path / 'tuned'}", "--threads", "1")
    with live_server(tmp_path, *args, faults="") as live, live.client() as client:
        bodies = [{"model": name, "input": "the dog"} for name in ("embedder", "tuned")]
        answers = [client.post("/v1/embeddings", json=body).json() for body in bodies]
        plain, tuned = (answer["data"][0]["embedding"] for answer in answers)
    assert plain != pytest.approx(tuned, abs=1e-3)
