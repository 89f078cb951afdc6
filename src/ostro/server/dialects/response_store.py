"""Responses that clients may come back for: bounded in bytes and in time, and each key's own. Knows no HTTP.

A response is kept as its JSON. The conversation behind it is a chain of exchanges, each with its own input and output,
so a chain that continues another one shares it instead of copying it. An exchange is freed with the last response
whose chain goes through it: deleting a response takes nothing from those that continue it.

    resp_1 ──> input, output of 1
    resp_2 ──> input, output of 2 ──> input, output of 1
    resp_3 ──> input, output of 3 ──> input, output of 1
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from ostro.errors import PreviousResponseUnknown, TryLater, UnknownResponse, Unsupported
from ostro.server.dialects.background import BackgroundRun
from ostro.server.dialects.response_items import Json

# What one entry takes beside its texts.
_OVERHEAD = 2048
_RETRY_SECONDS = 5

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[dict[str, object]]).decode


@dataclass(slots=True, eq=False)
class Exchange:
    """One request's input items and the output items that answered them."""

    previous: "Exchange | None"
    inputs: bytes
    outputs: bytes = b"[]"
    num_users: int = 0
    """Stored responses and stored later exchanges that need it."""

    @property
    def num_bytes(self) -> int:
        return _OVERHEAD + len(self.inputs) + len(self.outputs)

    @property
    def chain_bytes(self) -> int:
        """Of it and all before it."""
        total, each = 0, self
        while True:
            total += each.num_bytes
            if each.previous is None:
                return total
            each = each.previous

    def items(self) -> list[Json]:
        """The whole conversation so far."""
        blobs: list[bytes] = []
        each: Exchange | None = self
        while each is not None:
            blobs += (each.outputs, each.inputs)
            each = each.previous
        return [item for blob in reversed(blobs) for item in _decode(blob)]


@dataclass(slots=True, eq=False)
class StoredResponse:
    id: str
    owner: str
    exchange: Exchange
    expires: float
    body: bytes = b""
    """The response as JSON, once it has ended."""
    run: BackgroundRun | None = None
    """Whoever works on it, or has worked on it, in the background."""
    num_bytes: int = 0
    """As counted."""

    @property
    def is_running(self) -> bool:
        return self.run is not None and not self.run.is_over

    def inputs(self) -> list[Json]:
        return _decode(self.exchange.inputs)


class ResponseStore:
    """Safe to use from several threads."""

    def __init__(
        self, *, max_bytes: int = 64 << 20, seconds: float = 3600.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Without bytes nothing is stored."""
        self.max_bytes = max_bytes
        self.seconds = seconds
        self.num_bytes = 0
        self._clock = clock
        self._lock = threading.Lock()
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()

    @property
    def is_on(self) -> bool:
        return self.max_bytes > 0

    def __len__(self) -> int:
        with self._lock:
            self._expire()
            return len(self._stored)

    def check_is_on(self, param: str) -> None:
        if not self.is_on:
            raise Unsupported(
                f"{param} needs stored responses, and this server stores none. Send the whole conversation as input, "
                "or start the server with --response-store.",
                param=param,
            )

    def previous(self, owner: str, id: str) -> Exchange:
        """The exchange to continue; raises PreviousResponseUnknown."""
        self.check_is_on("previous_response_id")
        stored = self._find(owner, id)
        if stored is None or stored.is_running:
            why = "is not stored here" if stored is None else "has not ended"
            raise PreviousResponseUnknown(
                f"The response {id[:64]!r} {why}: it may have expired. Send the whole conversation as input.",
                param="previous_response_id",
            )
        return stored.exchange

    def get(self, owner: str, id: str) -> StoredResponse:
        """Raises UnknownResponse."""
        stored = self._find(owner, id)
        if stored is None:
            raise UnknownResponse(
                f"There is no response {id[:64]!r}. It may have expired, or was created with store set to false."
            )
        return stored

    def keep(self, owner: str, response: Json, inputs: Sequence[Json], previous: Exchange | None) -> None:
        """A response that has ended. One that is larger than the whole store is not kept."""
        stored = self._new(owner, str(response["id"]), inputs, previous)
        stored.body = _encode(response)
        stored.exchange.outputs = _encode(response["output"])
        with self._lock:
            self._add(stored)

    def begin(
        self, owner: str, id: str, inputs: Sequence[Json], previous: Exchange | None, run: BackgroundRun
    ) -> StoredResponse:
        """A response that is worked on. Raises TryLater if those that are under way leave no room for it."""
        stored = self._new(owner, id, inputs, previous)
        stored.run = run
        with self._lock:
            self._expire()
            running = [each for each in self._stored.values() if each.is_running]
            busy = sum(each.num_bytes + each.exchange.num_bytes for each in running)
            if busy + _OVERHEAD + stored.exchange.num_bytes > self.max_bytes:
                raise TryLater(
                    "Responses in the background fill the store already. Try again later, or without background.",
                    retry_after=_RETRY_SECONDS,
                )
            self._add(stored)
        return stored

    def update(self, stored: StoredResponse, response: Json) -> None:
        """With what has become of it, and of the events that its run has logged."""
        with self._lock:
            if self._stored.get(stored.id) is not stored:
                return
            self.num_bytes -= stored.num_bytes + stored.exchange.num_bytes
            stored.body = _encode(response)
            stored.exchange.outputs = _encode(response["output"])
            self.num_bytes += self._size(stored) + stored.exchange.num_bytes
            self._make_room()

    def grow(self, stored: StoredResponse, num_bytes: int) -> bool:
        """Counts events that a run has logged. False if there is no room for them, whatever else is dropped."""
        with self._lock:
            if self._stored.get(stored.id) is stored:
                stored.num_bytes += num_bytes
                self.num_bytes += num_bytes
                self._make_room()
            return self.num_bytes <= self.max_bytes

    def delete(self, owner: str, id: str) -> StoredResponse:
        """Raises UnknownResponse."""
        stored = self.get(owner, id)
        with self._lock:
            if self._stored.get(id) is stored:
                self._remove(stored)
        return stored

    def find_item(self, owner: str, id: str) -> Json | None:
        """An item of any response of the owner's, by the item's id; the newest counts."""
        needle = _encode(id)
        with self._lock:
            self._expire()
            exchanges = [each.exchange for each in reversed(self._stored.values()) if each.owner == owner]
        for exchange in exchanges:
            for blob in (exchange.outputs, exchange.inputs):
                if needle in blob:
                    for item in _decode(blob):
                        if item.get("id") == id:
                            return item
        return None

    def _find(self, owner: str, id: str) -> StoredResponse | None:
        with self._lock:
            self._expire()
            stored = self._stored.get(id)
        return stored if stored is not None and stored.owner == owner else None

    def _new(self, owner: str, id: str, inputs: Sequence[Json], previous: Exchange | None) -> StoredResponse:
        return StoredResponse(id, owner, Exchange(previous, _encode(inputs)), self._clock() + self.seconds)

    # --- under the lock -----------------------------------------------------------------------------------------------

    def _add(self, stored: StoredResponse) -> None:
        self._expire()
        if self._size(stored) + stored.exchange.num_bytes > self.max_bytes:
            return
        self._stored[stored.id] = stored
        self.num_bytes += self._size(stored)
        self._hold(stored.exchange)
        self._make_room()

    def _size(self, stored: StoredResponse) -> int:
        logged = 0 if stored.run is None else stored.run.num_bytes
        stored.num_bytes = _OVERHEAD + len(stored.body) + logged
        return stored.num_bytes

    def _hold(self, exchange: Exchange | None) -> None:
        while exchange is not None:
            exchange.num_users += 1
            if exchange.num_users > 1:
                return
            # New; or freed since it was found.
            self.num_bytes += exchange.num_bytes
            exchange = exchange.previous

    def _let_go(self, exchange: Exchange | None) -> None:
        while exchange is not None:
            exchange.num_users -= 1
            if exchange.num_users:
                return
            self.num_bytes -= exchange.num_bytes
            exchange = exchange.previous

    def _expire(self) -> None:
        now = self._clock()
        # In the order of their creation, and all live equally long.
        while self._stored:
            oldest = next(iter(self._stored.values()))
            if oldest.expires > now:
                return
            self._remove(oldest)

    def _make_room(self) -> None:
        for stored in list(self._stored.values()):
            if self.num_bytes <= self.max_bytes:
                return
            if not stored.is_running:
                self._remove(stored)

    def _remove(self, stored: StoredResponse) -> None:
        del self._stored[stored.id]
        self.num_bytes -= stored.num_bytes
        self._let_go(stored.exchange)
        if stored.run is not None:
            stored.run.cancel()
