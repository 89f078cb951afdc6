"""Hostile models beside a good one in one pool: whatever they do, the good one's answers are what they were.

Texts are attacked with the fake runner in the engines, which is quick; weights and configs with real ones. While the
hostile models are asked, the good one answers the same questions
again and again; each answer must be the same to the last character, and every probe a 200.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server
from model_directory import write_model
from safetensors.torch import load_file, save_file

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "the quick"}]
BACKTRACKING, BACKTRACKED = "(z+)+$", "z" * 40 + "!"


def with_template(directory: Path, source: str) -> None:
    write_model(directory, chat_template=source)


def with_regex(directory: Path, pattern: str) -> None:
    model = write_model(directory)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    own = tokenizer["pre_tokenizer"]
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, own]}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))


def with_nan(directory: Path) -> None:
    model = write_model(directory)
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][:] = float("nan")
    save_file(weights, model / "model.safetensors")


def with_config(directory: Path, **changes: Any) -> None:
    model = write_model(directory)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_model(root / "good", seed=1)
    with_template(root / "looping", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    with_template(root / "growing", '{{ "%1500000000d" % 1 }}')
    with_regex(root / "backtracking", BACKTRACKING)
    with_nan(root / "nan")
    with_config(root / "endless", max_position_embeddings=10**12)
    with_config(root / "rotating", partial_rotary_factor=400_000.0)
    with_config(root / "headless", num_attention_heads=0)
    return root


def serving(models: Path, directory: Path, faults: str) -> AbstractContextManager[LiveServer]:
    args = ("--models", str(models), "--pin", "good", "--max-models", "3", "--threads", "1", "--kv-memory", "16M")
    return live_server(directory, *args, faults=faults)


@pytest.fixture(scope="module")
def fake_server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(models, tmp_path_factory.mktemp("fake"), "fake") as live:
        yield live


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(models, tmp_path_factory.mktemp("real"), "") as live:
        yield live


class Good(threading.Thread):
    """Asks the good model the same questions, and probes, until it is told to stop."""

    def __init__(self, server: LiveServer) -> None:
        super().__init__()
        self._server = server
        self._over = threading.Event()
        self.answers: list[tuple[str, str]] = []
        self.probes: list[int] = []

    def run(self) -> None:
        with self._server.client() as client:
            while not self._over.is_set() or not self.answers:
                self.probes.append(client.get("/healthz").status_code)
                self.answers.append(answers_of(client, "good"))

    def stop(self) -> None:
        self._over.set()
        self.join()


def answers_of(client: httpx.Client, model: str) -> tuple[str, str]:
    completion = client.post(COMPLETIONS, json=asked(model, prompt="the quick brown"))
    chat = client.post(CHAT, json=asked(model, messages=HELLO))
    assert (completion.status_code, chat.status_code) == (200, 200), (completion.text, chat.text)
    return completion.json()["choices"][0]["text"], chat.json()["choices"][0]["message"]["content"]


def asked(model: str, **fields: object) -> dict[str, object]:
    return {"model": model, "max_tokens": 12, "temperature": 0, **fields}


@contextmanager
def undisturbed(server: LiveServer) -> Iterator[httpx.Client]:
    """A client for hostile requests. The good model's answers and its process are the same afterwards as before."""
    with server.client() as client:
        before = answers_of(client, "good")
        good = Good(server)
        good.start()
        try:
            yield client
        finally:
            good.stop()
        assert set(good.answers) == {before}
        assert set(good.probes) == {200}
        stats = {model["id"]: model for model in client.get("/admin/stats").json()["models"]}
        assert (stats["good"]["loads"], stats["good"]["restarts"]) == (1, 0)


def error_of(response: httpx.Response) -> str:
    assert response.status_code in (400, 500, 503), response.text
    return str(response.json()["error"]["message"])


@pytest.mark.parametrize(
    ("model", "reason"), [pytest.param("looping", "ran longer", marks=pytest.mark.full), ("growing", "memory")]
)
def test_template_bomb_is_refused_and_its_model_completes_plain_prompts(
    fake_server: LiveServer, model: str, reason: str
) -> None:
    """A looping template kept /healthz waiting for ten seconds."""
    with undisturbed(fake_server) as client:
        assert reason in error_of(client.post(CHAT, json=asked(model, messages=HELLO)))
        assert reason in error_of(client.post("/tokenize", json={"model": model, "messages": HELLO}))
        assert client.post(COMPLETIONS, json=asked(model, prompt="the quick")).status_code == 200


def test_regex_that_backtracks_fails_its_own_text(fake_server: LiveServer) -> None:
    with undisturbed(fake_server) as client:
        response = client.post(COMPLETIONS, json=asked("backtracking", prompt=BACKTRACKED))
        assert "gave up on this text" in error_of(response)
        assert client.post(COMPLETIONS, json=asked("backtracking", prompt="the quick")).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "reason"),
    [("nan", "finite"), ("rotating", "partial_rotary_factor"), ("headless", "num_attention_heads")],
)
def test_unusable_weights_and_configs_fail_their_own_model(server: LiveServer, model: str, reason: str) -> None:
    with undisturbed(server) as client:
        assert reason in error_of(client.post(COMPLETIONS, json=asked(model, prompt="the quick")))


@pytest.mark.slow
def test_context_of_a_trillion_tokens_takes_no_more_room_than_there_is(server: LiveServer) -> None:
    with undisturbed(server) as client:
        response = client.post(COMPLETIONS, json=asked("endless", prompt="the quick") | {"max_tokens": 10**9})
        assert error_of(response)
