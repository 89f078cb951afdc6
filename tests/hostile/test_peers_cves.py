"""Classes of vulnerabilities that other inference servers had, as a standing suite over all that this one serves.

One test is one class, named by it, and goes through every route, setting or pattern that it can enumerate, so that a
new one is covered when it appears. Single cases in depth are elsewhere: `tests/server/test_hostile.py`, `test_auth.py`,
`test_hosts.py`, `tests/hostile`. Classes of files are in `test_peers_cves_files.py`.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import os
import random
import re
import statistics
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import httpx
import pytest
from checkout import ROOT
from every_family import some
from fastapi import FastAPI
from listening_sockets import Listening, listening_in
from live_server import LiveServer, live_server
from model_directory import write_model
from playground_page import until
from regex_pumps import CpuLimit, Found, pumped, regexes_in, slowest
from scripted_server import CLOSE, Scripted, plain, scripted_server
from served_routes import Answered, files_of_the_page, routes_of_the_app, send, wire
from starlette.middleware import Middleware

from ostro import Client
from ostro.answers import formats
from ostro.answers.profile import ReasoningMarkers
from ostro.answers.reader import AnswerReader
from ostro.answers.tools import Tool
from ostro.config import PREFIX, EngineConfig
from ostro.errors import OstroError
from ostro.sampling_params import SamplingParams
from ostro.server.admission.auth import DOCS_PATHS, OPEN_PATHS, Authentication, Keyring
from ostro.server.app import build_app
from ostro.server.lifecycle import middlewares
from ostro.server.log.setup import RequestLog
from ostro.server.settings import Given, ServeSettings, read_settings

KEY, OTHER, ADMIN = "sk-mine-5c1f", "sk-theirs-88ab", "sk-boss-41d0"
MINE, THEIRS = {"authorization": f"Bearer {KEY}"}, {"authorization": f"Bearer {OTHER}"}
LOCAL = (("host", "localhost"),)
EVIL = "evil.example"

ROUTES = routes_of_the_app()
# The page of the documentation and its files ask for the key themselves.
CLOSED = [
    route for route in ROUTES if route.path not in OPEN_PATHS | DOCS_PATHS and not route.path.startswith("/docs/")
]


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Two keys and an admin's, with everything that can be served switched on."""
    keys = {"OSTRO_API_KEY": f"{KEY},{OTHER}", "OSTRO_ADMIN_KEY": ADMIN}
    with live_server(tmp_path_factory.mktemp("keyed"), "--ui", "--max-body-size", "8M", env=keys) as server:
        yield server
        assert "Traceback" not in server.log_text


@pytest.fixture(scope="module")
def keyless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("keyless")) as server:
        yield server
        assert "Traceback" not in server.log_text


# --- who may ask ----------------------------------------------------------------------------------------------------

# What a server behind a proxy might believe, and ours must not.
FORWARDED = (
    ("x-forwarded-host", "localhost"),
    ("x-forwarded-for", "127.0.0.1"),
    ("x-forwarded-prefix", "/healthz"),
    ("x-forwarded-uri", "/healthz"),
    ("x-original-url", "/healthz"),
    ("x-rewrite-url", "/healthz"),
    ("x-http-method-override", "GET"),
    ("forwarded", "for=127.0.0.1;host=localhost"),
    ("x-real-ip", "127.0.0.1"),
)
# Of some of these a library makes a URL whose path is an open one.
HOSTS: Sequence[Sequence[tuple[str, str]]] = [
    (),
    (("host", ""),),
    (("host", "x/healthz?"),),
    (("host", "localhost/healthz#"),),
    (("host", "localhost\\healthz"),),
    (("host", "["),),
    (("host", "[::1].evil.example"),),
    (("host", "user@localhost"),),
    (("host", "localhost:80@evil.example"),),
    (("host", "localhost"), ("host", EVIL)),
    (("host", EVIL), ("host", "localhost")),
    (*LOCAL, *FORWARDED),
]
REFUSED_OUTRIGHT = http.client.BAD_REQUEST


@pytest.mark.full
def test_host_header_tricks_against_auth(keyed: LiveServer, keyless: LiveServer) -> None:
    """No Host header and no form of the target replaces a key; without keys, only the server's names are answered."""
    with wire(keyed) as connection:
        for route in CLOSED:
            for headers in HOSTS:
                answer = send(connection, route.method, route.path, headers)
                assert answer.status in (401, REFUSED_OUTRIGHT), (route, headers, answer)
            for target in (f"http://localhost{route.path}", f"http://x/healthz/..{route.path}", f"*{route.path}"):
                answer = send(connection, route.method, target)
                assert answer.status in (401, REFUSED_OUTRIGHT), (route, target, answer)
    others = [*HOSTS[2:-1], (("host", EVIL),), (("host", EVIL), ("x-forwarded-host", "localhost"))]
    with wire(keyless) as connection:
        for route in CLOSED:
            for headers in others:
                answer = send(connection, route.method, route.path, headers)
                assert answer.status in (403, REFUSED_OUTRIGHT), (route, headers, answer)


def test_host_header_does_not_change_which_path_an_error_names(keyed: LiveServer) -> None:
    """Starlette makes a request's URL from the Host header: it raised, or named another path than the one asked for."""
    with wire(keyed) as connection:
        for host in ("[", "x/elsewhere?", EVIL):
            answer = send(connection, "GET", "/v1/nothing", (("host", host), *MINE.items()))
            assert answer.status in (404, REFUSED_OUTRIGHT), (host, answer)
            assert answer.status != 404 or b"There is no /v1/nothing here" in answer.body


def spellings(path: str) -> Iterator[str]:
    """Ways to write a path that a router, a proxy or a file system may take for the same."""
    yield path
    yield path + "/"
    yield "/" + path
    yield path.replace("/", "//")
    yield "/." + path
    yield "/healthz/.." + path
    yield "/%2e%2e" + path
    yield path[0] + f"%{ord(path[1]):02x}" + path[2:]
    yield path.replace("/", "%2f")
    yield path.replace("/", "%252f")
    yield path.upper()
    yield path + ";/healthz"
    yield path + "%00"
    yield path + "%0a"
    yield path + "%20"
    yield path + "?/healthz"
    yield path + "#/healthz"
    yield path.replace("/", "\\")[1:] if path.count("/") > 1 else path + "\\"


METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND", "QUERY", "get", "X")


def test_routes_outside_auth(keyed: LiveServer) -> None:
    """Every route of the app, by every method and spelling, wants a key, but for the probes and the pages' files.

    A peer checked keys for some prefixes only, another for some methods, and others before the path was normalised.
    """
    page = {route.path for route in files_of_the_page()}
    with wire(keyed) as connection:
        for route in CLOSED:
            for method in METHODS:
                answer = send(connection, method, route.path)
                assert answer.status in (401, REFUSED_OUTRIGHT), (method, route.path, answer)
            for target in spellings(route.path):
                answer = send(connection, route.method, target)
                assert answer.status in (401, REFUSED_OUTRIGHT), (route.method, target, answer)
        for path in sorted(OPEN_PATHS | page | {"/docs", "/docs/docs.js"}):
            assert send(connection, "GET", path).status == 200, path
            if path != "/":
                assert send(connection, "POST", path).status in (401, 405), path
        assert send(connection, "GET", "/ui/../v1/models").status == 401
        assert send(connection, "GET", "/ui/index.html").status == 401


def test_every_middleware_that_answers_is_known_to_these_tests() -> None:
    """One that answers a path outside authentication is to be listed with those that are open."""
    settings = ServeSettings(ui=True, enable_cors=True)  # type: ignore[call-arg]
    made = middlewares(settings, Keyring.of(["a"]), cast(Any, None), cast(Any, object()))
    names = [cast(type, each.cls).__name__ for each in made]
    assert names == [
        *("RequestLog", "TraceParent", "CORSMiddleware", "PlaygroundEndpoint"),
        *("Authentication", "MetricsEndpoint"),
    ]


@pytest.mark.parametrize("keyring", [Keyring.of(admin=[ADMIN]), Keyring.of([KEY], [ADMIN])], ids=["admin", "both"])
def test_routes_outside_auth_where_the_app_is_mounted_below_a_path(keyring: Keyring) -> None:
    """Auth compared whole paths and the router what follows the mount, so /llm/admin needed no admin key."""
    inner = build_app(
        cast(Any, None),
        middlewares=[
            Middleware(RequestLog, on_end=lambda record: None, access_log=False),
            Middleware(Authentication, keyring=keyring),
        ],
    )
    outer = FastAPI()
    outer.mount("/llm", inner)
    admins = [route for route in CLOSED if route.path.startswith("/admin/")]
    assert admins

    async def statuses() -> list[int]:
        transport = httpx.ASGITransport(app=outer)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=MINE) as client:
            paths = [f"{root}{route.path}" for route in admins for root in ("/llm", "/%6clm", "/llm/")]
            return [(await client.request("GET", path)).status_code for path in paths]

    assert set(asyncio.run(statuses())) <= {401, 404}
    assert 401 in asyncio.run(statuses())


# --- what listens ---------------------------------------------------------------------------------------------------


def assert_only_http_listens(server: LiveServer, sockets: Sequence[Listening]) -> None:
    port = httpx.URL(server.url).port
    beyond = [each for each in sockets if each.port != port]
    assert [each for each in sockets if each.port == port]
    assert not beyond, f"these listen too: {beyond}"


@pytest.mark.full
def test_pickle_on_sockets(keyed: LiveServer, tmp_path: Path) -> None:
    """Processes talk over socket pairs, which nobody else can connect to; the API's port speaks HTTP, and unpickles
    nothing. Peers listened on all addresses for objects from their workers, and unpickled what came.
    """
    assert_only_http_listens(keyed, listening_in(keyed.process.pid))
    mark = tmp_path / "ran"
    bomb = b"cposix\nsystem\n(S'touch %b'\ntR." % os.fsencode(mark)
    with wire(keyed) as connection:
        for route in CLOSED:
            for kind in ("application/python-pickle", "application/octet-stream", "application/x-msgpack"):
                headers = (*LOCAL, *MINE.items(), ("content-type", kind), ("content-length", str(len(bomb))))
                connection.putrequest(route.method, route.path, skip_host=True)
                for header in headers:
                    connection.putheader(*header)
                connection.endheaders(bomb)
                response = connection.getresponse()
                response.read()
                assert response.status < 500, (route, kind)
    assert not mark.exists()


@pytest.mark.full
def test_pickle_on_sockets_of_ranks(tmp_path: Path) -> None:
    """Ranks of a model that is divided over processes meet by a file, and connect on the loopback only."""
    model = write_model(tmp_path / "model", heads=4)
    divided = ("--backend", "torch", "--device", "cpu", "--tensor-parallel", "2", "--threads", "1", "--kv-memory", "8M")
    with live_server(tmp_path, str(model), *divided, faults="") as server:
        found = listening_in(server.process.pid)
        port = httpx.URL(server.url).port
        assert {each.is_loopback for each in found} == {True}
        # gloo listens once in each rank; its protocol carries tensors of a size that both sides know.
        assert len([each for each in found if each.port != port]) <= 2


@pytest.mark.full
def test_pickle_on_sockets_of_a_mesh(tmp_path: Path) -> None:
    """A mesh within one process needs no socket; those of several hosts are in tests/jax/test_jax_handshake.py."""
    pytest.importorskip("jaxlib", reason="JAX is an extra")
    model = write_model(tmp_path / "model")
    sizes = ("--max-batch-seqs", "2", "--max-batch-tokens", "16", "--kv-memory", "2M")
    env = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "OSTRO_CACHE": str(tmp_path / "cache")}
    divided = ("--backend", "jax", "--device", "cpu", "--tensor-parallel", "2", *sizes)
    with live_server(tmp_path, str(model), *divided, faults="", env=env, cold=True, ready=False) as server:
        # The mesh is complete when the first program was compiled for it; the others take a minute.
        until(lambda: "program 1 of" in server.log_text, "nothing was compiled", seconds=300)
        assert_only_http_listens(server, listening_in(server.process.pid))


@pytest.mark.slow
def test_pickle_on_sockets_of_a_cluster(tmp_path: Path) -> None:
    """Ray's own ports listen wherever Ray lets them: what Ostro adds to a cluster of this machine is none."""
    pytest.importorskip("ray.serve", reason="Ray is not installed: make test-ray")
    from ray_cluster import ray_cluster

    with ray_cluster(tmp_path, env={"OSTRO_FAULTS": "fake", "OMP_NUM_THREADS": "1"}) as cluster:
        before = {each.port for each in listening_in(cluster.process.pid)}
        cluster.deploy()
        engines = [each for each in listening_in(cluster.process.pid) if "ostro" in each.command]
        assert {each.port for each in engines} <= before


# --- counts and numbers ---------------------------------------------------------------------------------------------

SMALL = {"max_tokens": 1}
HELLO = [{"role": "user", "content": "Hello."}]
# A body that each endpoint takes, so that whatever is put in place of one field is what it refuses.
BODIES: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, **SMALL},
    "/v1/completions": {"prompt": "x", **SMALL},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/responses/input_tokens": {"input": "x"},
    "/v1/messages": {"model": "default", "messages": HELLO, **SMALL},
    "/v1/messages/count_tokens": {"model": "default", "messages": HELLO},
    "/v1/embeddings": {"input": "x"},
    "/v1/rerank": {"query": "x", "documents": ["y"]},
    "/v1/score": {"text_1": "x", "text_2": "y"},
    "/generate": {"prompts": ["x"], **SMALL},
    "/generate_stream": {"prompts": ["x"], **SMALL},
    "/loglikelihood": {"prompts": ["x"], "continuations": ["y"]},
    "/pseudo_loglikelihood": {"prompts": ["x"], "continuations": ["y"]},
    "/hrm/solve": {"puzzles": [[1, 2]]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/prefill": {"prompts": ["x"]},
    "/admin/profile": {"seconds": 0.01},
}
MANY = 200_000
COUNTS = (10**6, 2**31, 2**32, 2**63, 2**64, 10**30, -1, -(2**31), -(2**63), -(10**30))
ODD_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1e308", "-1e308", "5e-324", "1e-39", "-0.0")


class Operations:
    """What the server's own document says that requests hold."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._schemas = document["components"]["schemas"]
        self._paths = document["paths"]

    def fields(self) -> Iterator[tuple[str, str, set[str]]]:
        """Path, field and types of every field that a body may have."""
        for path, operations in self._paths.items():
            body = operations.get("post", {}).get("requestBody")
            if body is not None:
                schema = self._resolved(body["content"]["application/json"]["schema"])
                for name, field in schema["properties"].items():
                    yield path, name, set(self._types(field))

    def fields_of(self, path: str) -> list[tuple[str, set[str]]]:
        return [(name, types) for each, name, types in self.fields() if each == path]

    def _types(self, schema: Any) -> Iterator[str]:
        if not isinstance(schema, dict):
            return
        schema = self._resolved(schema)
        if "type" in schema:
            yield from [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        for each in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
            yield from self._types(each)

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema


@pytest.fixture(scope="module")
def operations(keyless: LiveServer) -> Operations:
    with keyless.client() as client:
        found = Operations(client.get("/openapi.json").json())
    assert {path for path, _, _ in found.fields()} == BODIES.keys(), "give each endpoint a body in BODIES"
    return found


def assert_refused_or_served(connection: http.client.HTTPConnection, path: str, name: str, value: bytes) -> None:
    """Soon, in either case, and as a mistake of whoever asked."""
    body = json.dumps({**BODIES[path], name: 0}).encode()
    body = body.replace(b'"%b": 0' % name.encode(), b'"%b": %b' % (name.encode(), value))
    began = time.monotonic()
    answer = send(connection, "POST", path, body=body)
    shown = (path, name, value[:60], answer.status, answer.body[:300])
    assert answer.status < 500 or answer.status == 501, shown
    assert time.monotonic() - began < 120, shown
    assert b"Traceback" not in answer.body, shown


@cache
def long_lists() -> list[bytes]:
    """Lists of all that lists hold: a body that is not too large, and a count that nobody needs."""
    entries: list[object] = ["x", 1, [1], HELLO[0], {"type": "function", "function": {"name": "f"}}, None]
    return [json.dumps([entry] * (MANY if len(str(entry)) < 4 else MANY // 20)).encode() for entry in entries]


def deep_values() -> list[bytes]:
    return [b"[" * 5_000 + b"]" * 5_000, b'{"items":' * 2_000 + b"{}" + b"}" * 2_000, b'{"a":' * 90 + b"1" + b"}" * 90]


@pytest.mark.full
@pytest.mark.parametrize("path", some(BODIES, "/v1/chat/completions", "/v1/embeddings", "/tokenize"))
def test_unbounded_counts(keyless: LiveServer, operations: Operations, path: str) -> None:
    """n, best_of, logprobs, top_k, lists of stops, tools, messages, prompts, inputs, depths: every number, list and
    object of every endpoint, far beyond what anybody needs. A peer made a copy of a request for each of 10**9 choices.
    """
    with wire(keyless) as connection:
        for name, types in operations.fields_of(path):
            values = [
                *((b"%d" % count for count in COUNTS) if types & {"integer", "number"} else ()),
                *(long_lists() if "array" in types else ()),
                *(deep_values() if types & {"object", "array"} else ()),
            ]
            for value in values:
                assert_refused_or_served(connection, path, name, value)
        assert send(connection, "GET", "/readyz").status == 200


@pytest.mark.full
def test_negative_and_non_finite_numbers_in_requests(keyless: LiveServer, operations: Operations) -> None:
    """Every number of every endpoint; words that JSON does not have are refused, whatever Python's parser thinks."""
    with wire(keyless) as connection:
        for path, name, types in operations.fields():
            if types & {"integer", "number"}:
                for number in ODD_NUMBERS:
                    assert_refused_or_served(connection, path, name, number.encode())
        for word in ("NaN", "Infinity", "-Infinity"):
            body = f'{{"prompt": "x", "temperature": {word}}}'.encode()
            assert send(connection, "POST", "/v1/completions", body=body).status == 400
        assert send(connection, "GET", "/readyz").status == 200


NUMERIC = [
    name for name, field in ServeSettings.model_fields.items() if re.search(r"\b(int|float)\b", str(field.annotation))
]
# A seed is any number.
MAY_BE_NEGATIVE = {"seed"}
WORDS = ("nan", "inf", "-inf", "-1", "-0.5", "1e400", "-1e400", "99999999999999999999999999", "0x10", "1e3000000")
YAML_WORDS = (".nan", ".inf", "-.inf", "-1", "-0.5", "1.0e+400", "99999999999999999999999999")


def numbers_of(settings: ServeSettings) -> dict[str, float]:
    """What the parts of a server would be given."""
    parts = (settings.engine(), settings.gate(), settings.pool(), settings.http().defaults, settings.http().body)
    values = {name: getattr(settings, name) for name in NUMERIC}
    for part in parts:
        values |= {name: getattr(part, name) for name in getattr(part, "__dataclass_fields__", ())}
    return {name: each for name, each in values.items() if isinstance(each, int | float)}


def assert_sane(read: Callable[[], ServeSettings], what: object) -> None:
    """Refused, or a finite number that is not negative."""
    try:
        found = numbers_of(read())
    except OstroError:
        return
    wrong = {
        name: each
        for name, each in found.items()
        if not math.isfinite(each) or (each < 0 and name not in MAY_BE_NEGATIVE)
    }
    assert not wrong, (what, wrong)


# `make test` has every third.
@pytest.mark.cases(2)
@pytest.mark.parametrize("name", some(NUMERIC, *NUMERIC[::3]))
def test_negative_and_non_finite_numbers_in_settings(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the command line, the environment, YAML and a model's own section of it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    file = tmp_path / "ostro.yaml"

    def of_file(text: str) -> Callable[[], ServeSettings]:
        file.write_text(text)
        return lambda: read_settings({}, config=file, directory=tmp_path).settings

    for word in WORDS:
        given = {name: Given(word, f"--{name}")}
        assert_sane(lambda given=given: read_settings(given, directory=tmp_path).settings, (name, word))  # type: ignore[misc]
        monkeypatch.setenv(PREFIX + name.upper(), word)
        assert_sane(lambda: read_settings({}, directory=tmp_path).settings, (name, word))
        monkeypatch.delenv(PREFIX + name.upper())
    for word in YAML_WORDS:
        assert_sane(of_file(f"{name}: {word}\n"), (name, word))
        own = of_file(f"model_settings: {{m: {{{name}: {word}}}}}\n")
        assert_sane(lambda own=own: own().of_model("m"), (name, word))  # type: ignore[misc]


def test_negative_and_non_finite_numbers_in_sampling_parameters() -> None:
    """Those of `LLM`, which no schema has checked."""
    for name, field in SamplingParams.__dataclass_fields__.items():
        if "float" not in str(field.type):
            continue
        for number in (math.nan, math.inf, -math.inf):
            with pytest.raises(OstroError):
                SamplingParams(**{name: number})  # type: ignore[arg-type]


# --- parsers --------------------------------------------------------------------------------------------------------

# Made at run time, of parts that were escaped or are the operator's own, or matched in linear time.
MADE_AT_RUN_TIME = {
    "answers/probe.py": "evidence of the formats, which are constants: tried with the others below",
    "formats/guidance_text.py": "names that are escaped",
    "server/settings/merging.py": "names of settings, which are constants",
    "sources/files.py": "a folder that is escaped",
    "sources/hub.py": "a file's name that is escaped",
    "text/control_text.py": "a class of characters that are escaped",
}
LENGTH, SECONDS = 20_000, 0.5
# Those that are given less than that, and why.
SHORTER: Mapping[str, tuple[int, str]] = {
    "client/failures.py": (2_000, "a message of a server, cut to this length"),
    "grammar/schema.py": (2_000, "the compiler's messages, in a process with a limit on its time"),
    "sources/files.py": (1_000, "names of files, matched as a whole"),
    "weights/quantized/fp8.py": (1_000, "names of tensors, matched as a whole"),
}


@pytest.fixture(scope="module")
def patterns() -> list[Found]:
    """Sought by a test, as it takes seconds: not by each process that only collects."""
    return regexes_in(ROOT / "src" / "ostro")


def test_regex_bombs_of_patterns_that_are_made_at_run_time_are_all_known(patterns: list[Found]) -> None:
    made = {each.place.partition(":")[0] for each in patterns if each.pattern is None}
    assert made == MADE_AT_RUN_TIME.keys()


def test_regex_bombs(patterns: list[Found]) -> None:
    """Every pattern in the sources takes hostile text in about linear time. Peers' parsers of tool calls hung on what a
    model wrote.
    """
    evidence = [Found(name, each) for name, format in formats.FORMATS.items() for each in format.evidence]
    slow = []
    for found in (*patterns, *evidence):
        if found.pattern is not None:
            length, _ = SHORTER.get(found.place.partition(":")[0], (LENGTH, ""))
            took, text = slowest(found, pumped(found.pattern, found.flags, length), SECONDS)
            if took >= SECONDS:
                slow.append(f"{found.place}: {found.pattern} for {text[:40]!r}… of {len(text)} characters")
    assert slow == []


TOOL = Tool(name="f", parameters={"type": "object", "properties": {"x": {"type": "string"}, "y": {}}})
THINK = ReasoningMarkers("<think>", "</think>")


def hostile_outputs(begin: str) -> dict[str, tuple[str, str]]:
    """Each a beginning, and what is repeated after it."""
    return {
        "white space": ("", " "),
        "lines": ("a", "\n"),
        "white space and words": ("", " \n\t a"),
        "begin markers": ("", begin or "["),
        "half a marker": ("", (begin or "<tool_call>")[:-1]),
        "an open object": (begin, '{"name'),
        "an open string": (begin + '{"name": "', "a"),
        "escapes": (begin + '{"arguments": "', "\\u00e9"),
        "arguments before the name": (begin + '{"arguments": {"x": "', "a"),
        "brackets": (begin + '{"name": "f", "arguments": ', "["),
        "a long name": (begin, "f"),
        "quotes": (begin + "[f(x=", '"'),
        "Python's escapes": (begin + "[f(x='", "\\'"),
        "numbers": (begin + "[f(x=", "1+"),
        "parameters": (begin + "<function=f>", "<parameter=x>1</parameter>"),
        "an open parameter": (begin + "<function=f><parameter=x>", "\n<"),
        "thoughts": ("<think>", begin + " a"),
        "an endless thought": ("<think>" + begin, "a "),
        "channels": ("<|channel|>", "<|channel|>analysis"),
        "space in a channel": ("<|channel|>final<|message|>", " "),
    }


def seconds_for(format: formats.CallFormat, lead: str, unit: str, length: int, piece: int) -> float:
    reader = AnswerReader(markers=THINK, format=format, tools={"f": TOOL})
    text = lead + unit * (length // len(unit))
    began = time.process_time()
    for start in range(0, len(text), piece):
        reader.push(text[start : start + piece])
    reader.end(cut=False)
    return time.process_time() - began


# A parser of JSON, and one of another syntax.
QUICK_FORMATS = {"hermes", "pythonic"}


@pytest.mark.full
@pytest.mark.parametrize("name", some(formats.FORMATS, *QUICK_FORMATS))
def test_parser_bombs_in_what_a_model_writes(name: str) -> None:
    """A reader's work grows with the text, not with its square: eight times the text, at most thirty times the time.

    White space was once joined to all before it with every token, and held text copied.
    """
    format = formats.FORMATS[name]
    for begin in {"", *format.begins[:1]}:
        for kind, (lead, unit) in hostile_outputs(begin).items():
            assert any(grows_evenly(format, lead, unit) for _ in range(4)), (name, kind)


def grows_evenly(format: formats.CallFormat, lead: str, unit: str) -> bool:
    """Whether it seems so this time: on a busy machine either measurement may be too long."""
    short = max(seconds_for(format, lead, unit, 2_000, 2), 0.002)
    with CpuLimit(60):
        return seconds_for(format, lead, unit, 16_000, 2) < 30 * short


@pytest.mark.parametrize("word", ["anyOf", "oneOf", "allOf"])
def test_schema_bombs_in_a_tool_whose_values_are_read_by_type(word: str) -> None:
    """Definitions that refer to one another ten times over were followed ten to the power of sixteen times."""
    parts = {f"d{n}": {word: [{"$ref": f"#/$defs/d{(n + 1) % 5}"}] * 10} for n in range(5)}
    schema: dict[str, object] = {"type": "object", "properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": parts}
    tagged = formats.FORMATS["qwen3_coder"]
    reader = AnswerReader(format=tagged, tools={"f": Tool(name="f", parameters=schema)})
    with CpuLimit(5):
        reader.push("<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>")
        reader.end(cut=False)
    assert reader.calls[0].arguments == '{"x": 1}'


def test_regex_bombs_in_structured_outputs(keyless: LiveServer) -> None:
    """Patterns of users are compiled by an engine that does not backtrack, after checks that do not either."""
    spaces = " " * 200_000
    asked: list[dict[str, object]] = [
        {"regex": "(a+)+$"},
        {"regex": "{" + spaces},
        {"regex": "a{1," + spaces},
        {"grammar": "\n" * 200_000 + "x"},
        {"grammar": "root ::= [a]{1," + spaces},
        {"grammar": 'start: "a"\n' + "a\n" * 60_000 + "["},
        {"guided_json": {"type": "string", "pattern": "{" + spaces[:1000]}},
    ]
    with wire(keyless) as connection:
        for fields in asked:
            body = json.dumps({"prompt": "x", "max_tokens": 1, **fields}).encode()
            began = time.monotonic()
            answer = send(connection, "POST", "/v1/completions", body=body)
            assert answer.status < 500, (list(fields), answer)
            assert time.monotonic() - began < 100, list(fields)


# --- what one key learns about another ------------------------------------------------------------------------------


def share_below(ones: Sequence[float], others: Sequence[float]) -> float:
    """How often one of these is less than one of those: a half if they tell nothing apart."""
    pairs = [(one < other) + (one == other) / 2 for one in ones for other in others]
    return statistics.fmean(pairs)


@pytest.mark.full
def test_timing_of_cached_prefixes_between_keys(tmp_path: Path) -> None:
    """Neither the count of cached tokens nor the time of an answer tells whether another key has sent a prompt.

    A prompt takes a step for every 64 tokens that are not cached, and a step takes a while: one's own cached prompts
    are told from new ones by every pair of times, another key's cached prompts by no more than chance.
    """
    draw, keys = random.Random(7), {"OSTRO_API_KEY": f"{KEY},{OTHER}"}
    faults = "fake,step_seconds=0.02"
    mine: list[float] = []
    theirs: list[float] = []
    fresh: list[float] = []
    with (
        live_server(tmp_path, "--max-batch-tokens", "64", env=keys, faults=faults) as server,
        server.client(**MINE) as client,
        server.client(**THEIRS) as neighbour,
    ):

        def timed(prompt: list[int], *, cached: bool) -> float:
            began = time.monotonic()
            answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
            took = time.monotonic() - began
            found = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert (found > 0) is cached, (found, cached)
            return took

        for _ in range(20):
            known, new = ([draw.randrange(1000) for _ in range(640)] for _ in range(2))
            sent = neighbour.post("/v1/completions", json={"prompt": known, "max_tokens": 1})
            assert sent.status_code == 200
            order = [(theirs, known), (fresh, new)]
            draw.shuffle(order)
            for times, prompt in order:
                times.append(timed(prompt, cached=False))
            mine.append(timed(known, cached=True))
    assert share_below(mine, fresh) > 0.9, "the measurement itself shows nothing"
    # Of twenty and twenty the share is a half give or take 0.09: this is more than four times that.
    assert 0.1 < share_below(theirs, fresh) < 0.9, (theirs, fresh)


# --- what errors say ------------------------------------------------------------------------------------------------

SECRET_PROMPT = "the-neighbours-diary-7f3e"
SECRETS = {
    "HF_TOKEN": "hf_canary1d2c",
    "AWS_SECRET_ACCESS_KEY": "aws-canary-9e1b",
    "GOOGLE_APPLICATION_CREDENTIALS": "/canary-google/key.json",
    "DATABASE_URL": "postgres://canary-db",
}


def malformed() -> list[bytes]:
    bodies: list[object] = [
        {},
        [],
        {"model": "../../etc/passwd"},
        {"model": "broken"},
        {"model": "good", "prompt": {"a": 1}, "messages": 1, "input": 1.5, "prompts": {}},
        {"model": "nobody", "prompt": "x", "messages": HELLO, "input": "x", "prompts": ["x"], "max_tokens": 1},
        {"previous_response_id": "resp_canary", "input": "x"},
        {"prompt": "x", "messages": HELLO, "structured_outputs": {"grammar": "root ::= ("}},
        {"prompt": "word " * 100_000, "prompts": ["word " * 100_000], "input": "word " * 100_000},
    ]
    return [json.dumps(each).encode() for each in bodies] + [b"{", b"\xff\xfe", b'{"a": NaN}', b"[" * 10_000]


def test_errors_that_leak_paths_keys_or_prompts(tmp_path: Path) -> None:
    """Every error of every route, with secrets in the environment, in the paths of models, and in another key's
    requests. Peers sent stack traces, paths of their files, and pieces of others' requests.
    """
    home = tmp_path / "canary-directory"
    write_model(home / "models" / "good")
    (home / "models" / "broken").mkdir()
    (home / "models" / "broken" / "config.json").write_text('{"model_type": "canary')
    (home / "models" / "broken" / "model.safetensors").write_bytes(b"\xff" * 100)
    keys = {"OSTRO_API_KEY": f"{KEY},{OTHER}", "OSTRO_ADMIN_KEY": ADMIN}
    arguments = ("--models", str(home / "models"), "--threads", "1", "--kv-memory", "4M", "--max-body-size", "1M")
    canaries = {
        *("canary", KEY, OTHER, ADMIN, SECRET_PROMPT, str(tmp_path), "site-packages", "Traceback", ".py", "/src/"),
        *SECRETS.values(),
    }
    told: list[tuple[str, Answered]] = []
    with live_server(home, *arguments, faults="", env={**keys, **SECRETS}) as server:
        with server.client(**THEIRS) as neighbour:
            asked = {"model": "good", "prompt": SECRET_PROMPT, "max_tokens": 1}
            assert neighbour.post("/v1/completions", json=asked).status_code == 200
        with wire(server) as connection:
            for route in ROUTES:
                for key in (KEY, ADMIN, "wrong"):
                    headers = (*LOCAL, ("authorization", f"Bearer {key}"))
                    if (key == ADMIN) is not route.path.startswith("/admin"):
                        told.append((str(route), send(connection, "DELETE", route.path, headers)))
                        continue
                    bodies = malformed() if route.method == "POST" else [None]
                    told += [(str(route), send(connection, route.method, route.path, headers, each)) for each in bodies]
            for path in ("/v1/canary", "/admin/unload/..%2f..%2fcanary", "/v1/models/%2fetc%2fpasswd"):
                told.append((path, send(connection, "POST", path, (*LOCAL, ("authorization", f"Bearer {ADMIN}")))))
    errors = [(place, each) for place, each in told if each.status >= 400]
    assert len(errors) > 200
    assert {400, 401, 404, 405} <= {each.status for _, each in errors}
    for place, each in errors:
        # What somebody sent may come back to them.
        text = each.everything.replace("resp_canary", "").replace("/v1/canary", "").replace("..canary", "")
        text = text.replace("..%2f..%2fcanary", "").replace("../../canary", "")
        assert not [word for word in canaries if word in text], (place, text[:1000])
        assert len(each.body) < 4_000, (place, text[:300])


# --- names that are paths -------------------------------------------------------------------------------------------

PATHS = (
    *("../outside", "..", "../../outside", "models/../../outside", "./good", "good/..", "good/../../outside", "/etc"),
    *(
        "..%2foutside",
        "%2e%2e/outside",
        "..\\outside",
        "good\0",
        "~",
        "~root",
        "$HOME",
        "file:///etc",
        ".hidden",
    ),
)


@pytest.mark.full
def test_names_that_are_paths(tmp_path: Path) -> None:
    """A model's name never leads out of the directory of models, in a body, in a path, or as an adapter's. A peer wrote
    files to wherever a name pointed.
    """
    write_model(tmp_path / "models" / "good")
    outside = write_model(tmp_path / "outside")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    arguments = (
        "--models",
        str(tmp_path / "models"),
        "--threads",
        "1",
        "--kv-memory",
        "4M",
        "--profile",
        str(tmp_path),
    )
    run = tmp_path.with_name(tmp_path.name + "-run")
    run.mkdir()
    with live_server(run, *arguments, faults="") as server, wire(server) as connection:
        for name in (*PATHS, str(outside)):
            for path in BODIES if name == PATHS[0] else ("/v1/completions", "/v1/embeddings"):
                answer = send(connection, "POST", path, body={**BODIES[path], "model": name})
                assert answer.status in (400, 403, 404), (path, name, answer)
            spelt = quote(name, safe="/%")
            for path in (f"/admin/load/{spelt}", f"/admin/pin/{spelt}"):
                answer = send(connection, "POST", path)
                assert answer.status in (404, REFUSED_OUTRIGHT), (path, answer)
            answer = send(connection, "GET", f"/v1/models/{spelt}")
            assert answer.status in (404, REFUSED_OUTRIGHT), (name, answer)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    for name in PATHS:
        with pytest.raises(OstroError):
            EngineConfig(adapters=((name, str(outside)),))


# --- sizes ----------------------------------------------------------------------------------------------------------


def test_header_sizes(keyed: LiveServer) -> None:
    """However a head grows, it is cut off, on every route and before its key is looked at."""
    heads: list[tuple[str, list[tuple[str, str]]]] = [
        ("", [("x-long", "y" * 200_000)]),
        ("", [("x" * 200_000, "y")]),
        ("", [(f"x-{number}", "y" * 50) for number in range(4_000)]),
        ("", [("authorization", "Bearer " + "k" * 200_000)]),
        ("?" + "q" * 200_000, []),
    ]
    for route in CLOSED:
        query, headers = heads[hash(route) % len(heads)]
        # It may hang up while the rest is still on its way.
        with wire(keyed) as connection, suppress(ConnectionError, http.client.HTTPException):
            answer = send(connection, route.method, route.path + query, [*LOCAL, *headers])
            assert answer.status == 431, (route, answer)
    with wire(keyed) as connection:
        # A key within a head that is not too long is compared, and no more than that.
        long = send(connection, "GET", "/v1/models", [*LOCAL, ("authorization", "Bearer " + "k" * 50_000)])
        assert long.status == 401
        assert send(connection, "GET", "/healthz").status == 200


# --- tokens that are for somebody else ------------------------------------------------------------------------------

_TOKEN = "canary-token-3c7d"
REDIRECTS = (301, 302, 303, 307, 308)


def redirecting(status: int, to: Callable[[], str]) -> Callable[[str, Any], list[bytes]]:
    def answer(path: str, body: Any) -> list[bytes]:
        head = f"HTTP/1.1 {status} Elsewhere\r\nLocation: {to()}{path}\r\nx-amz-bucket-region: eu-x-1\r\n"
        return [f"{head}Content-Length: 0\r\nConnection: close\r\n\r\n".encode(), CLOSE]

    return answer


def elsewhere(trap: Scripted) -> str:
    """The same machine under another name and port: another host to every client."""
    return trap.url.replace("127.0.0.1", "localhost")


ASK_HUB = """
import sys
from ostro.errors import OstroError
from ostro.sources.hub import HubFiles, HubModel, fetch
for ask in (lambda: fetch(HubModel("org/model"), progress=False), lambda: HubFiles(HubModel("org/model"))):
    try:
        ask()
    except OstroError as error:
        print(error.message)
"""
ASK_STORE = """
from ostro.errors import OstroError
from ostro.sources import base, {kind}
base.FIRST_WAIT_SECONDS = 0.01
source = {kind}.{name}("models")
for ask in (lambda: list(source.list("x")), lambda: source.stat("x"), lambda: list(source.read("x", "1", 0, 9))):
    try:
        ask()
    except (OstroError, base.Transient, base.ObjectChanged) as error:
        print(error)
"""
_GOOGLE = """
from google.oauth2.credentials import Credentials
from google.cloud import storage
from ostro.sources import gcs
gcs._client = lambda: storage.Client(project="p", credentials=Credentials("{token}"))
"""


def asked_by(program: str, directory: Path, environment: Mapping[str, str]) -> None:
    import subprocess

    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "AWS_", "GOOGLE_"))}
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**kept, "HF_HOME": str(directory), "OSTRO_CACHE": str(directory), **environment},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr.decode()[-2000:]


@pytest.mark.parametrize("status", [302, pytest.param(307, marks=pytest.mark.full)])
@pytest.mark.parametrize("place", ["hub", "s3", "gcs"])
def test_tokens_sent_to_a_redirected_host(place: str, status: int, tmp_path: Path) -> None:
    """HF_TOKEN and the credentials of buckets stay with the host that they are for. A peer signed in wherever the
    registry sent it.
    """
    with (
        scripted_server(lambda path, body: [plain({}, 404)]) as trap,
        scripted_server(redirecting(status, lambda: elsewhere(trap))) as honest,
    ):
        if place == "hub":
            asked_by(ASK_HUB, tmp_path, {"HF_ENDPOINT": honest.url, "HF_TOKEN": _TOKEN})
        elif place == "s3":
            keys = {"AWS_ACCESS_KEY_ID": _TOKEN, "AWS_SECRET_ACCESS_KEY": "s", "AWS_CONFIG_FILE": os.devnull}
            program = ASK_STORE.format(kind="s3", name="S3Source")
            asked_by(program, tmp_path, {"AWS_ENDPOINT_URL": honest.url, **keys})
        else:
            program = _GOOGLE.format(token=_TOKEN) + ASK_STORE.format(kind="gcs", name="GcsSource")
            asked_by(program, tmp_path, {"STORAGE_EMULATOR_HOST": honest.url})
    assert any(_TOKEN.encode() in head for head in honest.heads), "nothing was asked with a token"
    assert not [head for head in trap.heads if _TOKEN.encode() in head]


@pytest.mark.parametrize("status", REDIRECTS)
def test_keys_of_a_client_sent_to_a_redirected_host(status: int) -> None:
    """Ostro's own client follows nobody, with its key or without."""
    with (
        scripted_server(lambda path, body: [plain({}, 200)]) as trap,
        scripted_server(redirecting(status, lambda: elsewhere(trap))) as honest,
        Client(honest.url, api_key=_TOKEN, max_retries=0) as client,
        pytest.raises(OstroError),
    ):
        client.models()
    assert any(_TOKEN.encode() in head for head in honest.heads)
    assert trap.heads == []


def test_addresses_in_requests_are_not_fetched(keyless: LiveServer) -> None:
    """Server-side request forgery: images, files, schemas and tools that are elsewhere are refused or left there."""
    with scripted_server(lambda path, body: [plain({})]) as trap:
        at = trap.url + "/secret"
        content = [
            {"type": "image_url", "image_url": {"url": at}},
            {"type": "input_image", "image_url": at},
            {"type": "input_file", "file_url": at},
            {"type": "input_audio", "input_audio": {"data": at, "format": "wav"}},
            {"type": "image", "source": {"type": "url", "url": at}},
            {"type": "document", "source": {"type": "url", "url": at}},
            {"type": "video_url", "video_url": {"url": at}},
        ]
        tools = [{"type": "mcp", "server_label": "x", "server_url": at}, {"type": "web_search", "url": at}]
        schema = {"$ref": at, "$schema": at, "$id": at}
        parts: list[dict[str, Any]] = [
            *({"messages": [{"role": "user", "content": [each]}]} for each in content),
            *({"input": [{"role": "user", "content": [each]}], "messages": HELLO} for each in content),
            *({"input": "x", "messages": HELLO, "prompt": "x", "tools": [each]} for each in tools),
            {
                "messages": HELLO,
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            },
            {"prompt": at, "messages": HELLO, "model": at},
            {"prompt": "x", "chat_template": at, "messages": HELLO},
        ]
        with wire(keyless) as connection:
            for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions"):
                for body in parts:
                    answer = send(connection, "POST", path, body={"max_tokens": 1, **body})
                    assert answer.status < 500, (path, body, answer)
    assert trap.connections == []


# --- what we build on -----------------------------------------------------------------------------------------------


def test_libraries_with_a_known_hole_are_not_allowed() -> None:
    """Starlette before 1.0.1 lets a Host header change the path of a request's URL, by which some check keys."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert "starlette>=1.0.1" in needed
    pinned = re.search(r"(?m)^starlette==(\S+)", (ROOT / "constraints.txt").read_text())
    assert pinned is not None
    for version in (pinned[1], metadata.version("starlette")):
        assert tuple(map(int, version.split(".")[:3])) >= (1, 0, 1)
