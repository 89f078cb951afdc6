"""Requests that a server keeps in memory, of every kind: for `held_requests.py` beside this file, and for the test that
compares the memory with the ledger. Knows HTTP and /proc, so it needs Linux.

    with Holder(host, port, pid, key, size=…) as holder:
        holder.begin(kind)                              # what there must be first
        before = anonymous_bytes(pid), holder.ledger()
        holder.hold(kind, number)                       # all of them are held when it returns

A request counts as held if it is not answered, or with 200: a refusal holds nothing.
"""

import json
import os
import re
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ostro.weights import open_checkpoint
from serving import children_of

_PATIENCE_SECONDS = 120.0
_POLL_SECONDS = 0.05
_RECEIVE_BYTES = 4 << 10
# Ethernet's.
_SEGMENT_BYTES = 1400
# At least one in each thread that decodes or tokenises.
_NUM_WARM = 4
COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"
SMALL: Mapping[str, object] = {"model": "a", "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
_LONG: Mapping[str, object] = {"model": "a", "prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
_RESPONSE: Mapping[str, object] = {"model": "a", "input": "Once", "max_output_tokens": 4000}


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """For `ostro serve`: two models that run nothing, of which "b" is loaded on request; and room for all kinds."""

    faults: str = "fake,step_seconds=0.05"
    store: str = "512M"

    @property
    def arguments(self) -> list[str]:
        path = open_checkpoint().path
        models = ["--model", f"a={path}", "--model", f"b={path}", "--pin", "a"]
        return [*models, "--response-store", self.store, "--max-batch-seqs", "512"]


SERVER = ServerOptions()


class Refused(Exception):
    """The server does not hold the request."""


class Caller:
    """Sends requests of one key, each on a connection of its own."""

    def __init__(self, host: str, port: int, key: str) -> None:
        self._address = host, port
        self._key = key

    def send(self, method: str, path: str, body: object = None, *, share: float = 1.0) -> socket.socket:
        """Sends that share of the body."""
        data = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {self._key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n"
        )
        with _resets_are_refusals(), ExitStack() as failed:
            connection = failed.enter_context(_connection(self._address))
            connection.sendall(head.encode() + data[: int(share * len(data))])
            failed.pop_all()
            return connection

    def ask(self, method: str, path: str, body: object = None) -> bytes:
        """The whole answer's body. Raises Refused if its status is not 200."""
        with _resets_are_refusals(), self.send(method, path, body) as connection:
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        _check_status(answer)
        return answer.partition(b"\r\n\r\n")[2]

    def post(self, path: str, body: object) -> Any:
        return json.loads(self.ask("POST", path, body))

    def metric(self, name: str) -> int:
        """The sum over its labels."""
        lines = self.ask("GET", "/metrics").decode().splitlines()
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


def _connection(address: tuple[str, int]) -> socket.socket:
    """Long answers that are not read stay with the server, as the system has little room for them: over the loopback's
    own segments of 64 KiB, it would take megabytes.
    """
    connection = socket.socket()
    connection.settimeout(_PATIENCE_SECONDS)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT_BYTES)
    connection.connect(address)
    return connection


def _resume(pid: int) -> None:
    # A server may have replaced an engine that said nothing for long.
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _check_status(answer: bytes) -> None:
    if answer.split(maxsplit=2)[1:2] != [b"200"]:
        raise Refused(answer[:500].decode(errors="replace"))


@contextmanager
def _resets_are_refusals() -> Iterator[None]:
    """A server that answers before it has read a long body closes the connection, and the answer may be lost."""
    try:
        yield
    except (ConnectionResetError, BrokenPipeError) as error:
        raise Refused("the connection was reset") from error


@dataclass(frozen=True, slots=True)
class Kind:
    hold: Callable[["Holder", int], object]
    """Has the server hold the request of that number."""
    begin: Callable[["Holder"], object] | None = None
    """What there must be before the first one. Without it, there are a few of the same kind: the first ones have the
    server make what it then keeps.
    """
    waits_inside: bool = False
    """Whether it is held, unanswered, once it is inside the gate."""


class Holder:
    """One key's requests, each with a text of about `size` bytes; lets go of them all when it is left."""

    def __init__(self, host: str, port: int, pid: int, key: str, *, size: int) -> None:
        self.caller = Caller(host, port, key)
        self.pid = pid
        self.size = size
        self.stored_id = self.item_id = ""
        self._open = ExitStack()
        self._connections: list[socket.socket] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    @property
    def text(self) -> str:
        return "word " * (self.size // 5)

    def ledger(self) -> int:
        return self.caller.metric("ostro_held_bytes")

    def begin(self, kind: Kind) -> None:
        if kind.begin is not None:
            kind.begin(self)
        else:
            self.hold(kind, _NUM_WARM)

    def hold(self, kind: Kind, number: int) -> None:
        """Raises Refused if a request is refused."""
        inside = self.caller.metric("ostro_requests_under_way")
        for each in range(number):
            kind.hold(self, each)
        if kind.waits_inside:
            self.until(lambda: self.caller.metric("ostro_requests_under_way") >= inside + number)
        self._check_refusals()

    def until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not happened():
            self._check_refusals()
            if time.monotonic() > deadline:
                raise TimeoutError("not all requests are held")
            time.sleep(_POLL_SECONDS)

    def keep(self, connection: socket.socket) -> None:
        self._connections.append(self._open.enter_context(connection))

    def keep_answered(self, connection: socket.socket) -> bytes:
        """Keeps it once its answer has begun; what has come of it."""
        begun = self._open.enter_context(connection).recv(1 << 10)
        _check_status(begun)
        return begun

    def pause(self, pids: Iterable[int]) -> None:
        """Stops the processes until this is left."""
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
            self._open.callback(_resume, pid)

    def _check_refusals(self) -> None:
        for connection in select.select(self._connections, [], [], 0)[0]:
            # An answer with 200 is one of a model or grammar that was there already.
            self._connections.remove(connection)
            with _resets_are_refusals():
                _check_status(connection.recv(1 << 16))


def anonymous_bytes(pid: int) -> int:
    """Resident memory that no file stands behind."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) << 10


# --- kinds ------------------------------------------------------------------------------------------------------------


def _stalled(holder: Holder, number: int) -> None:
    before = holder.ledger()
    holder.keep(holder.caller.send("POST", COMPLETIONS, {**SMALL, "prompt": holder.text}, share=0.95))
    holder.until(lambda: holder.ledger() - before >= 0.9 * holder.size)


def _stream(holder: Holder, number: int) -> None:
    asked = {**_LONG, "prompt": holder.text, "truncate_prompt_tokens": 4}
    holder.keep_answered(holder.caller.send("POST", COMPLETIONS, asked))


def _background(holder: Holder, number: int) -> None:
    holder.caller.post(RESPONSES, {**_truncated(holder, number), "background": True})


def _background_for_model(holder: Holder, number: int) -> None:
    holder.caller.post(RESPONSES, {**_RESPONSE, "model": "b", "background": True, "input": holder.text})


def _logged(holder: Holder, number: int) -> None:
    holder.keep_answered(holder.caller.send("POST", RESPONSES, _told(holder)))


def _told(holder: Holder) -> dict[str, object]:
    """A response that fails, as its prompt is too long. Each of its events repeats the instructions."""
    return {**_RESPONSE, "background": True, "stream": True, "instructions": holder.text}


def _truncated(holder: Holder, number: int) -> dict[str, object]:
    """A request with a long input, of which only the end becomes part of the prompt."""
    texts = [holder.text, f"And {number}?"]
    items = [{"type": "message", "role": "user", "content": text} for text in texts]
    return {**_RESPONSE, "input": items, "truncation": "auto"}


def _conversation(holder: Holder, number: int) -> str:
    """Stores a response; its id."""
    return str(holder.caller.post(RESPONSES, {**_truncated(holder, number), "max_output_tokens": 1})["id"])


def _begin_conversation(holder: Holder) -> None:
    holder.stored_id = _conversation(holder, 0)
    listed = json.loads(holder.caller.ask("GET", f"{RESPONSES}/{holder.stored_id}/input_items?order=asc&limit=1"))
    holder.item_id = listed["data"][0]["id"]
    for number in range(_NUM_WARM):
        _continued(holder, number)


def _continued(holder: Holder, number: int) -> None:
    asked = {**_RESPONSE, "previous_response_id": holder.stored_id, "truncation": "auto", "stream": True}
    holder.keep_answered(holder.caller.send("POST", RESPONSES, asked))


def _referenced(holder: Holder, number: int) -> None:
    items = [{"type": "item_reference", "id": holder.item_id}, {"type": "message", "role": "user", "content": "And?"}]
    asked = {**_RESPONSE, "input": items, "truncation": "auto", "stream": True}
    holder.keep_answered(holder.caller.send("POST", RESPONSES, asked))


def _begin_log(holder: Holder) -> None:
    holder.stored_id = _id_in(holder.caller.ask("POST", RESPONSES, _told(holder)))


def _id_in(events: bytes) -> str:
    """A response's id in its events, or in the beginning of them."""
    found = re.search(rb'"id":"(resp_\w+)"', events)
    assert found is not None
    return found[1].decode()


def _replayed(holder: Holder, number: int) -> None:
    holder.keep_answered(holder.caller.send("GET", f"{RESPONSES}/{holder.stored_id}?stream=true"))


def _deleted(holder: Holder, number: int) -> None:
    """Deletes a response that has failed while a client reads its events."""
    connection = holder.caller.send("POST", RESPONSES, _told(holder))
    path = f"{RESPONSES}/{_id_in(holder.keep_answered(connection) + connection.recv(1 << 10))}"
    holder.until(lambda: json.loads(holder.caller.ask("GET", path))["status"] == "failed")
    holder.caller.ask("DELETE", path)


def _retrieved(holder: Holder, number: int) -> None:
    holder.keep_answered(holder.caller.send("GET", f"{RESPONSES}/{holder.stored_id}"))


def _for_grammar(holder: Holder, number: int) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "choice", "schema": {"enum": [f"{number}", "x"]}}}
    holder.keep(holder.caller.send("POST", COMPLETIONS, {**SMALL, "prompt": holder.text, "response_format": form}))


def _stop_grammars(holder: Holder) -> None:
    """Has a first grammar checked, and stops the processes that do it. Their limit is on CPU time."""
    schema = {"name": "choice", "schema": {"enum": ["first"]}}
    form = {"type": "json_schema", "json_schema": schema}
    holder.caller.post(COMPLETIONS, {**SMALL, "response_format": form})
    checking = [pid for pid in children_of(holder.pid) if b"check_process" in _command(pid)]
    # They work in forks.
    holder.pause([*checking, *(fork for pid in checking for fork in children_of(pid))])


def _for_model(holder: Holder, number: int) -> None:
    holder.keep(holder.caller.send("POST", COMPLETIONS, {**SMALL, "model": "b", "prompt": holder.text}))


def _stop_loading(holder: Holder) -> None:
    """Has the second model loaded, and stops the process that does."""
    before = _engines(holder.pid)
    holder.keep(holder.caller.send("POST", COMPLETIONS, {**SMALL, "model": "b"}))
    holder.until(lambda: bool(_engines(holder.pid) - before))
    holder.pause(_engines(holder.pid) - before)


def _engines(pid: int) -> set[int]:
    """The server's children but for those that check grammars or render templates, which come when it is idle."""
    others = (b"check_process", b"render_process")
    return {each for each in children_of(pid) if not any(other in _command(each) for other in others)}


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        # It has ended.
        return b""


KINDS: Mapping[str, Kind] = {
    "stalled bodies": Kind(_stalled),
    "streams": Kind(_stream),
    "background": Kind(_background, waits_inside=True),
    "background, for a model": Kind(_background_for_model, begin=_stop_loading, waits_inside=True),
    "background, logged": Kind(_logged),
    "stored": Kind(_conversation),
    "continued": Kind(_continued, begin=_begin_conversation),
    "referenced": Kind(_referenced, begin=_begin_conversation),
    "replayed": Kind(_replayed, begin=_begin_log),
    "deleted": Kind(_deleted),
    "retrieved": Kind(_retrieved, begin=_begin_log),
    "for a grammar": Kind(_for_grammar, begin=_stop_grammars, waits_inside=True),
    "for a model": Kind(_for_model, begin=_stop_loading, waits_inside=True),
}
