"""A hostile key and a polite one on one server: what the hostile one can take from the other, and learn about it.

By places and order, not by time; `bench/fairness.py` has the times.
"""

import json
import select
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from live_server import LiveServer, live_server

COMPLETIONS = "/v1/completions"
HOSTILE, POLITE, URGENT = "sk-hostile", "sk-polite", "sk-urgent"
KEYS = {"OSTRO_API_KEY": f"{HOSTILE},{POLITE}", "OSTRO_PRIORITY_KEY": URGENT}
SLOW = "fake,step_seconds=0.01"
# Minutes of work: it is over when whoever asked for it hangs up.
ENDLESS = {"prompt": [1, 2, 3], "max_tokens": 7000, "ignore_eos": True}
SHORT = {"prompt": [4, 5, 6], "max_tokens": 4, "ignore_eos": True}
LONG_PROMPT = [number % 500 for number in range(100)]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def ask(server: LiveServer, key: str, body: Mapping[str, object], path: str = COMPLETIONS) -> httpx.Response:
    with server.client(**bearer(key)) as client:
        return client.post(path, json=body)


def open_stream(server: LiveServer, key: str, body: Mapping[str, object]) -> socket.socket:
    """A request that is sent, and whose answer nobody reads but for its first line."""
    address = urlsplit(server.url)
    connection = socket.create_connection((address.hostname, address.port), timeout=60)
    data = json.dumps({**body, "stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    connection.sendall(head.encode() + data)
    return connection


def status_of(connection: socket.socket) -> int:
    return int(connection.recv(12, socket.MSG_WAITALL)[-3:])


def until_refused(connections: list[socket.socket], count: int) -> None:
    """Waits until so many have been told 429. Of the others some have an answer that begins, and some wait for one."""
    silent, refused = list(connections), 0
    while refused < count:
        readable, _, _ = select.select(silent, [], [], 60)
        assert readable, f"{refused} of {len(connections)} were refused"
        silent = [each for each in silent if each not in readable]
        refused += sum(status_of(each) == HTTPStatus.TOO_MANY_REQUESTS for each in readable)
    assert refused == count


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    limits = ("--max-concurrent-requests", "8", "--max-queue-requests", "8", "--max-batch-seqs", "4")
    with live_server(tmp_path_factory.mktemp("tenants"), *limits, faults=SLOW, env=KEYS) as server:
        yield server


def test_flood_of_one_key_that_never_reads_leaves_the_other_its_place(server: LiveServer) -> None:
    """It took every place, and the other key's first request got a 429."""
    with ExitStack() as held:
        flood = [held.enter_context(open_stream(server, HOSTILE, ENDLESS)) for _ in range(20)]
        until_refused(flood, 8)
        for _ in range(3):
            assert ask(server, POLITE, SHORT).status_code == HTTPStatus.OK


@pytest.mark.full
def test_request_of_many_prompts_does_not_keep_others_waiting(server: LiveServer) -> None:
    """It counted as one, and filled the engine's batch: others waited for one of its prompts to be done."""
    prompts = [[number % 500, 7] for number in range(2048)]
    received = bytearray()

    def read(connection: socket.socket) -> None:
        while data := connection.recv(1 << 20):
            received.extend(data)

    with open_stream(server, HOSTILE, {**ENDLESS, "prompt": prompts, "max_tokens": 1000}) as connection:
        assert status_of(connection) == HTTPStatus.OK
        reader = threading.Thread(target=read, args=[connection])
        reader.start()
        try:
            for _ in range(3):
                assert ask(server, POLITE, SHORT).status_code == HTTPStatus.OK
            assert b'"finish_reason":"length"' not in received
            assert received
        finally:
            connection.shutdown(socket.SHUT_RDWR)
            reader.join()


def test_negative_priority_needs_a_key_that_may(server: LiveServer) -> None:
    refused = ask(server, HOSTILE, {**SHORT, "priority": -1})
    assert refused.status_code == HTTPStatus.FORBIDDEN
    assert (refused.json()["error"]["param"], refused.json()["error"]["code"]) == ("priority", "not_allowed")
    assert ask(server, URGENT, {**SHORT, "priority": -1}).status_code == HTTPStatus.OK
    assert ask(server, HOSTILE, {**SHORT, "priority": 1}).status_code == HTTPStatus.OK


def cached(answer: httpx.Response) -> int:
    assert answer.status_code == HTTPStatus.OK, answer.text
    found = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(found, int)
    return found


def test_cached_tokens_tell_no_key_what_another_has_sent(server: LiveServer) -> None:
    body = {"prompt": LONG_PROMPT, "max_tokens": 1}
    assert cached(ask(server, POLITE, body)) == 0
    assert cached(ask(server, POLITE, body)) > 0
    assert cached(ask(server, HOSTILE, body)) == 0
    label_of_polite = _last_request(server, COMPLETIONS, POLITE)["key"]
    assert cached(ask(server, HOSTILE, {**body, "cache_salt": f"{label_of_polite} "})) == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"prompts": [LONG_PROMPT[::-1]], "max_tokens": 1}),
        ("/loglikelihood", {"prompts": [[3, *LONG_PROMPT]], "continuations": [[5, 6]]}),
    ],
)
def test_native_endpoints_take_a_salt(server: LiveServer, path: str, body: dict[str, object]) -> None:
    hits = []
    for salt in ("", "", "pepper"):
        assert ask(server, POLITE, {**body, "cache_salt": salt}, path).status_code == HTTPStatus.OK
        hits.append(int(_last_request(server, path, POLITE)["cached_tokens"]) > 0)
    assert hits == [False, True, False]


@pytest.mark.full
def test_keys_share_the_cache_if_configured(tmp_path: Path) -> None:
    with live_server(tmp_path, "--share-prefix-cache", env=KEYS) as server:
        body = {"prompt": LONG_PROMPT, "max_tokens": 1}
        assert cached(ask(server, POLITE, body)) == 0
        assert cached(ask(server, HOSTILE, body)) > 0


def _last_request(server: LiveServer, path: str, key: str) -> dict[str, str]:
    """The log's last line about a request of the key, by a probe that is logged after it."""
    marker = f"/after/{path.strip('/')}/{len(server.log_text)}"
    with server.client(**bearer(key)) as client:
        client.get(marker)
    while f'"path": "{marker}"' not in server.log_text:
        time.sleep(0.01)
    lines = [json.loads(line) for line in server.log_text.splitlines() if '"request"' in line]
    found: dict[str, str] = [line for line in lines if line.get("path") == path][-1]
    return found
