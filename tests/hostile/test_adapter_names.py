"""Hostile names of adapters: in settings, on the command line, in requests and in paths. A name that is accepted is
safe in a path and a log line; any other is refused by name, and finds nothing.
"""

import json
from collections.abc import Iterator
from urllib.parse import quote

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from live_server import LiveServer, live_server
from model_directory import write_model
from native_models import needs_library
from peft_directory import random_adapter

from ostro.config import EngineConfig, is_name
from ostro.errors import BadRequest, OstroError
from ostro.server.models.build import fixed_specs
from ostro.server.settings import ServeSettings
from ostro.torch_models.build import build_model

HOSTILE = (
    *("..", "../french", "french/..", "a..b", "french/../../etc", "/etc/passwd", "..\\french", "~root", ".hidden"),
    *("french\0", "fre\nnch", "french\r\n", "\x1b[2J", "fr\u202ench", "french\u200b", "\ufeff", "\ud800"),
    # Letters that look like ASCII: Cyrillic ie, fullwidth, a ligature, an Arabic digit, the Kelvin sign.
    *("fr\u0435nch", "\uff46rench", "\ufb01le", "\u0661", "\u212a"),
    *("", " ", "french ", "french=german", "-french", "a/b/c", "french/", "//", "%2e%2e", "${HOME}", "{{french}}"),
    *("x" * 97, "x" * 5000, "*"),
)


@pytest.mark.full
@given(st.text(max_size=300) | st.text("ab./-_", max_size=20))
@example("a..b")
@example("x" * 97)
def test_an_adapters_name_is_a_models_name_or_refused(name: str) -> None:
    """Adapters' names had a syntax of their own, which took `a..b` and names of any length."""
    if is_name(name):
        assert EngineConfig(adapters=((name, "./x"),)).adapter_names == (name,)
        return
    with pytest.raises(BadRequest) as refused:
        EngineConfig(adapters=((name, "./x"),))
    assert len(refused.value.message) < 2000


# After a name that is good, the rest would be a directory.
@pytest.mark.parametrize("name", [name for name in HOSTILE if "=" not in name], ids=ascii)
def test_the_command_line_and_config_files_refuse_hostile_names(name: str) -> None:
    with pytest.raises(OstroError):
        fixed_specs(ServeSettings.model_validate({"model": ["base=./base"], "lora": [f"{name}=./adapter"]}))


@pytest.mark.parametrize("name", ["base", "default", "gpt"])
def test_an_adapter_does_not_take_the_name_of_another_model(name: str) -> None:
    given = {"model": ["base=./base"], "served_model_name": ["gpt"], "lora": [f"{name}=./adapter"]}
    settings = ServeSettings.model_validate(given)
    with pytest.raises(BadRequest, match=name):
        fixed_specs(settings)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = tmp_path_factory.mktemp("adapters")
    base = write_model(directory / "base")
    shape = build_model(json.loads((base / "config.json").read_text()), dtype=torch.float32)
    random_adapter(directory / "french", shape)
    arguments = (str(base), "--lora", f"french={directory / 'french'}", "--threads", "1", "--kv-memory", "4M")
    with live_server(directory, *arguments, faults="") as running:
        yield running


@needs_library
@pytest.mark.full
def test_no_hostile_name_finds_an_adapter(server: LiveServer) -> None:
    with server.client() as client:
        found = client.post("/v1/completions", json={"model": "french", "prompt": "hi", "max_tokens": 1})
        assert found.status_code == 200, found.text
        for name in HOSTILE:
            body = json.dumps({"model": name, "prompt": "hi", "max_tokens": 1})
            answer = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
            assert answer.status_code in (400, 404), (name, answer.text)
            assert len(answer.text) < 2000, name
            path = quote(name, safe="", errors="surrogatepass")
            for verb in ("load", "unload", "pin"):
                answer = client.post(f"/admin/{verb}/{path}")
                assert answer.status_code in (400, 404, 405), (verb, name, answer.text)
            if path:
                assert client.get(f"/v1/models/{path}").status_code in (400, 404), name
        assert client.get("/healthz").status_code == 200
    log = server.log.read_bytes()
    assert b"Traceback" not in log
    assert b"\x1b" not in log
    assert all(json.loads(line) for line in log.splitlines())
