"""Stored responses, bounded in bytes and lifetime and separated by API key. Knows no HTTP.

A response is stored as JSON. The conversation behind it is a chain of exchanges, each holding one request's input and
output, so a response that continues another one shares its history instead of copying it. An exchange is freed along
with the last response whose chain includes it: deleting a response does not affect those that continue it.

    resp_1 ──> input, output of 1
    resp_2 ──> input, output of 2 ──> input, output of 1
    resp_3 ──> input, output of 3 ──> input, output of 1
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from ostro.errors import BadRequest, PreviousResponseUnknown, TryLater, UnknownResponse, Unsupported
from ostro.server.dialects.responses.event_log import BackgroundRun
from ostro.server.dialects.responses.items import Json

# Estimated memory of an entry besides its JSON, and of an item in the index.
_OVERHEAD = 2048
_INDEX_ENTRY = 256
_RETRY_SECONDS = 5
# A log that takes more of the store is dropped: everything else would have to make room for it.
_MAX_LOG_SHARE = 1 / 4

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[dict[str, object]]).decode


@dataclass(slots=True, eq=False)
class Exchange:
    """One request's input items and the output items that answered them."""

    owner: str
    previous: "Exchange | None"
    inputs: bytes
    input_ids: tuple[str, ...]
    outputs: bytes = b"[]"
    output_ids: tuple[str, ...] = ()
    num_users: int = 0
    """Stored responses and later exchanges that refer to it."""

    @property
    def num_bytes(self) -> int:
        indexed = _INDEX_ENTRY * (len(self.input_ids) + len(self.output_ids))
        return _OVERHEAD + len(self.inputs) + len(self.outputs) + indexed

    @property
    def ids(self) -> tuple[str, ...]:
        return self.input_ids + self.output_ids

    def answer(self, outputs: Sequence[Json]) -> None:
        self.outputs, self.output_ids = _encode(outputs), _ids(outputs)

    @property
    def chain_bytes(self) -> int:
        """Total size of this exchange and all earlier ones."""
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
    """Its background run, if it has one, even after the run has ended."""
    num_bytes: int = 0
    """Bytes counted for it in the store, without its exchange."""

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
        """`max_bytes=0` stores nothing."""
        self.max_bytes = max_bytes
        self.seconds = seconds
        self.num_bytes = 0
        self._clock = clock
        self._lock = threading.Lock()
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._owners: dict[str, _Owner] = {}
        self._items: dict[tuple[str, str], Exchange] = {}
        """The newest exchange that contains an item, by owner and item id."""

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
        """The exchange to continue. Raises PreviousResponseUnknown, or BadRequest if it has not ended."""
        self.check_is_on("previous_response_id")
        stored = self._find(owner, id)
        if stored is None:
            raise PreviousResponseUnknown(
                f"The response {id[:64]!r} is not stored here: it may have expired. Send the whole conversation as "
                "input.",
                param="previous_response_id",
            )
        if stored.is_running:
            raise BadRequest(
                f"The response {id[:64]!r} has not ended yet. Wait until it has, or cancel it.",
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
        """Stores a response that has ended, unless it is larger than the whole store."""
        stored = self._new(owner, str(response["id"]), inputs, previous)
        stored.body = _encode(response)
        stored.exchange.answer(_outputs(response))
        with self._lock:
            self._add(stored)

    def begin(
        self, owner: str, id: str, inputs: Sequence[Json], previous: Exchange | None, run: BackgroundRun
    ) -> StoredResponse:
        """Stores a response before it runs in the background. Raises TryLater if running ones leave no room."""
        stored = self._new(owner, id, inputs, previous)
        stored.run = run
        with self._lock:
            self._expire()
            running = [each for each in self._stored.values() if each.is_running]
            busy = sum(each.num_bytes + each.exchange.num_bytes for each in running)
            if busy + _OVERHEAD + stored.exchange.num_bytes > self.max_bytes:
                raise TryLater(
                    "Background responses already fill the store. Try again later, or without background.",
                    retry_after=_RETRY_SECONDS,
                )
            self._add(stored)
        return stored

    def update(self, stored: StoredResponse, response: Json) -> None:
        """Replaces a running response with its outcome."""
        with self._lock:
            if self._stored.get(stored.id) is not stored:
                return
            self._count(stored.owner, -stored.num_bytes - stored.exchange.num_bytes)
            stored.body = _encode(response)
            stored.exchange.answer(_outputs(response))
            self._index(stored.exchange)
            self._count(stored.owner, self._size(stored) + stored.exchange.num_bytes)
            self._make_room()

    def grow(self, stored: StoredResponse, num_bytes: int) -> bool:
        """Counts a run's logged events. Returns False, and counts none of its log any more, if the log has grown too
        large, or if keys that have stored less would have to make room for it.
        """
        with self._lock:
            if self._stored.get(stored.id) is not stored:
                return True
            stored.num_bytes += num_bytes
            self._count(stored.owner, num_bytes)
            logged = stored.num_bytes - _OVERHEAD - len(stored.body)
            fits = logged <= _MAX_LOG_SHARE * self.max_bytes and self._make_room(for_owner=stored.owner)
            if not fits:
                stored.num_bytes -= logged
                self._count(stored.owner, -logged)
            return fits

    def delete(self, owner: str, id: str) -> StoredResponse:
        """Raises UnknownResponse."""
        stored = self.get(owner, id)
        with self._lock:
            if self._stored.get(id) is stored:
                self._remove(stored)
        return stored

    def find_items(self, owner: str, ids: Iterable[str]) -> dict[str, Json]:
        """Items of the owner's responses by their ids; unknown ones are missing from the result."""
        with self._lock:
            self._expire()
            found = {id: self._items[owner, id] for id in ids if (owner, id) in self._items}
        items: dict[str, Json] = {}
        # Each exchange is decoded once, however many of its items are wanted.
        for exchange in {id(each): each for each in found.values()}.values():
            for item in (*_decode(exchange.inputs), *_decode(exchange.outputs)):
                if found.get(str(item.get("id"))) is exchange:
                    items[str(item["id"])] = item
        return items

    def _find(self, owner: str, id: str) -> StoredResponse | None:
        with self._lock:
            self._expire()
            stored = self._stored.get(id)
        return stored if stored is not None and stored.owner == owner else None

    def _new(self, owner: str, id: str, inputs: Sequence[Json], previous: Exchange | None) -> StoredResponse:
        exchange = Exchange(owner, previous, _encode(inputs), _ids(inputs))
        return StoredResponse(id, owner, exchange, self._clock() + self.seconds)

    # --- under the lock -----------------------------------------------------------------------------------------------

    def _add(self, stored: StoredResponse) -> None:
        self._expire()
        if self._size(stored) + stored.exchange.num_bytes > self.max_bytes:
            return
        self._stored[stored.id] = stored
        self._owners.setdefault(stored.owner, _Owner()).stored[stored.id] = stored
        self._count(stored.owner, self._size(stored))
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
            # New, or freed since the request found it.
            self._count(exchange.owner, exchange.num_bytes)
            self._index(exchange)
            exchange = exchange.previous

    def _let_go(self, exchange: Exchange | None) -> None:
        while exchange is not None:
            exchange.num_users -= 1
            if exchange.num_users:
                return
            self._count(exchange.owner, -exchange.num_bytes)
            for id in exchange.ids:
                if self._items.get((exchange.owner, id)) is exchange:
                    del self._items[exchange.owner, id]
            exchange = exchange.previous

    def _index(self, exchange: Exchange) -> None:
        self._items |= {(exchange.owner, id): exchange for id in exchange.ids}

    def _expire(self) -> None:
        now = self._clock()
        # Ordered by creation, and all have the same lifetime.
        while self._stored:
            oldest = next(iter(self._stored.values()))
            if oldest.expires > now:
                return
            self._remove(oldest)

    def _make_room(self, for_owner: str | None = None) -> bool:
        """Repeatedly drops the oldest finished response of the key that has stored the most. With `for_owner`, keys
        that have stored less lose nothing. Returns whether there is room now.
        """
        while self.num_bytes > self.max_bytes:
            least = 0 if for_owner is None else self._owners[for_owner].num_bytes
            richest = sorted(self._owners.values(), key=lambda owner: owner.num_bytes, reverse=True)
            ended = (owner.oldest_ended() for owner in richest if owner.num_bytes >= least)
            if (dropped := next(filter(None, ended), None)) is None:
                return False
            self._remove(dropped)
        return True

    def _count(self, owner: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        account = self._owners.setdefault(owner, _Owner())
        account.num_bytes += num_bytes
        if not account.num_bytes and not account.stored:
            del self._owners[owner]

    def _remove(self, stored: StoredResponse) -> None:
        del self._stored[stored.id]
        del self._owners[stored.owner].stored[stored.id]
        self._count(stored.owner, -stored.num_bytes)
        self._let_go(stored.exchange)
        if stored.run is not None:
            stored.run.cancel()


@dataclass(slots=True)
class _Owner:
    """What one key has stored."""

    num_bytes: int = 0
    stored: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)

    def oldest_ended(self) -> StoredResponse | None:
        return next((stored for stored in self.stored.values() if not stored.is_running), None)


def _ids(items: Sequence[Json]) -> tuple[str, ...]:
    return tuple(str(item["id"]) for item in items if "id" in item)


def _outputs(response: Json) -> list[Json]:
    outputs = response["output"]
    assert isinstance(outputs, list)
    return outputs
