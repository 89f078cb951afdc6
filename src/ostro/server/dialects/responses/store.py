"""Stored responses, bounded in bytes and lifetime and separated by API key. Knows no HTTP.

The keys share the store's bytes: while a key stores no more than its part, others cannot push anything of it out.

A response is stored as JSON. The conversation behind it is a chain of exchanges, each holding one request's input and
output, so a response that continues another one shares its history instead of copying it. An exchange is freed along
with the last response whose chain includes it: deleting a response does not affect those that continue it.

    resp_1 ──> input, output of 1
    resp_2 ──> input, output of 2 ──> input, output of 1
    resp_3 ──> input, output of 3 ──> input, output of 1
"""

import itertools
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from ostro.errors import BadRequest, PreviousResponseUnknown, TryLater, UnknownResponse, Unsupported
from ostro.schemas.responses import MAX_ITEMS
from ostro.server.admission.shares import Shares
from ostro.server.dialects.responses.event_log import BackgroundRun
from ostro.server.dialects.responses.items import Json

# Estimated memory of an entry besides its JSON, and of an item in the index.
_OVERHEAD = 2048
_INDEX_ENTRY = 256
_RETRY_SECONDS = 5
# A conversation is translated anew for each response that continues it: it may be as long as a request's own input, and
# no context has room for more text.
MAX_CHAIN_BYTES = 16 << 20
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
    num_runs: int = 0
    """Running responses and later exchanges that pin it."""

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
        return sum(each.num_bytes for each in self.chain())

    @property
    def chain_items(self) -> int:
        return sum(len(each.ids) for each in self.chain())

    def items(self) -> list[Json]:
        """The whole conversation so far."""
        blobs = [blob for each in self.chain() for blob in (each.outputs, each.inputs)]
        return [item for blob in reversed(blobs) for item in _decode(blob)]

    def chain(self) -> "Iterator[Exchange]":
        """The newest first."""
        each: Exchange | None = self
        while each is not None:
            yield each
            each = each.previous


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
    num_reserved: int = 0
    """Bytes set aside for its input, until `add_inputs`. Nothing is stored in them: only `_pinned` counts them."""
    num_bytes: int = 0
    """Bytes counted for it in the store, without its exchange."""
    is_pinned: bool = False
    """Whether it is counted among those that cannot be dropped, because they run."""

    @property
    def is_running(self) -> bool:
        return self.run is not None and not self.run.is_over

    def inputs(self) -> list[Json]:
        return _decode(self.exchange.inputs)


class ResponseStore:
    """Safe to use from several threads."""

    def __init__(self, room: Shares, *, seconds: float = 3600.0, clock: Callable[[], float] = time.monotonic) -> None:
        """`room` is in bytes; nothing is stored if there is none."""
        self.seconds = seconds
        self._room = room
        self._pinned = room.empty()
        """The part of the room that running responses take: it would be left if all others were dropped."""
        self._clock = clock
        self._lock = threading.Lock()
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._of_owner: defaultdict[str, OrderedDict[str, StoredResponse]] = defaultdict(OrderedDict)
        self._items: dict[tuple[str, str], Exchange] = {}
        """The newest exchange that contains an item, by owner and item id."""

    @property
    def is_on(self) -> bool:
        return self._room.total > 0

    @property
    def max_bytes(self) -> int:
        return self._room.total

    @property
    def num_bytes(self) -> int:
        return self._room.used

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
        _check_length(id, stored.exchange)
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
        self, owner: str, id: str, num_bytes: int, previous: Exchange | None, run: BackgroundRun
    ) -> StoredResponse:
        """Stores a response before it runs in the background; its input, of about `num_bytes`, follows once it is read.
        Raises TryLater if running responses leave no room.
        """
        stored = self._new(owner, id, (), previous)
        stored.run, stored.num_reserved = run, num_bytes
        with self._lock:
            self._expire()
            if not self._pinned.has_room(owner, _OVERHEAD + num_bytes + _unpinned_bytes(stored.exchange)):
                raise TryLater(
                    "Background responses already fill the store. Try again later, or without background.",
                    retry_after=_RETRY_SECONDS,
                )
            self._add(stored)
            self._pin(stored)
        return stored

    def add_inputs(self, stored: StoredResponse, inputs: Sequence[Json]) -> None:
        """Adds a running response's input."""
        with self._lock:
            if self._stored.get(stored.id) is not stored:
                return
            self._count(stored, -stored.num_bytes - stored.exchange.num_bytes)
            self._let_go_of_reserve(stored)
            stored.exchange.inputs, stored.exchange.input_ids = _encode(inputs), _ids(inputs)
            self._index(stored.exchange)
            self._count(stored, self._size(stored) + stored.exchange.num_bytes)
            self._make_room()

    def update(self, stored: StoredResponse, response: Json) -> None:
        """Replaces a running response with its outcome."""
        with self._lock:
            body = _encode(response)
            if self._stored.get(stored.id) is not stored:
                # Whoever cancelled it is still to be told.
                stored.body = body
                return
            self._unpin(stored)
            self._count(stored, -stored.num_bytes - stored.exchange.num_bytes)
            stored.num_reserved = 0
            stored.body = body
            stored.exchange.answer(_outputs(response))
            self._index(stored.exchange)
            self._count(stored, self._size(stored) + stored.exchange.num_bytes)
            self._make_room()

    def grow(self, stored: StoredResponse, num_bytes: int) -> bool:
        """Counts a run's logged events. Returns False, and counts none of its log any more, if the log has grown too
        large, or if keys that have stored less would have to make room for it.
        """
        with self._lock:
            if self._stored.get(stored.id) is not stored:
                return True
            stored.num_bytes += num_bytes
            self._count(stored, num_bytes)
            logged = stored.num_bytes - _OVERHEAD - len(stored.body)
            fits = logged <= _MAX_LOG_SHARE * self._room.total and self._make_room(for_owner=stored.owner)
            if not fits:
                stored.num_bytes -= logged
                self._count(stored, -logged)
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
        if self._size(stored) + stored.exchange.num_bytes > self._room.most_for_one:
            return
        self._stored[stored.id] = self._of_owner[stored.owner][stored.id] = stored
        self._room.take(stored.owner, self._size(stored))
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
            self._room.take(exchange.owner, exchange.num_bytes)
            self._index(exchange)
            exchange = exchange.previous

    def _let_go(self, exchange: Exchange | None) -> None:
        while exchange is not None:
            exchange.num_users -= 1
            if exchange.num_users:
                return
            self._room.give_back(exchange.owner, exchange.num_bytes)
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

    def _count(self, stored: StoredResponse, num_bytes: int) -> None:
        """Counts this much more, or less, for it or for its own exchange."""
        self._room.take(stored.owner, num_bytes)
        if stored.is_pinned:
            self._pinned.take(stored.owner, num_bytes)

    def _pin(self, stored: StoredResponse) -> None:
        if stored.id not in self._stored:
            return
        stored.is_pinned = True
        self._pinned.take(stored.owner, stored.num_bytes + stored.num_reserved)
        for exchange in stored.exchange.chain():
            exchange.num_runs += 1
            if exchange.num_runs > 1:
                return
            self._pinned.take(exchange.owner, exchange.num_bytes)

    def _let_go_of_reserve(self, stored: StoredResponse) -> None:
        if stored.is_pinned:
            self._pinned.give_back(stored.owner, stored.num_reserved)
        stored.num_reserved = 0

    def _unpin(self, stored: StoredResponse) -> None:
        if not stored.is_pinned:
            return
        stored.is_pinned = False
        self._pinned.give_back(stored.owner, stored.num_bytes + stored.num_reserved)
        for exchange in stored.exchange.chain():
            exchange.num_runs -= 1
            if exchange.num_runs:
                return
            self._pinned.give_back(exchange.owner, exchange.num_bytes)

    def _make_room(self, for_owner: str | None = None) -> bool:
        """Repeatedly drops the oldest finished response of the key that has stored the most, among those with more than
        their part. With `for_owner`, keys that have stored less lose nothing. Returns whether there is room now.
        """
        while self._room.is_over:
            least = 0 if for_owner is None else self._room.used_by(for_owner)
            richest = sorted(filter(self._room.is_beyond_own, self._of_owner), key=self._room.used_by, reverse=True)
            ended = (self._oldest_ended(owner) for owner in richest if self._room.used_by(owner) >= least)
            if (dropped := next(filter(None, ended), None)) is None:
                return False
            self._remove(dropped)
        return True

    def _oldest_ended(self, owner: str) -> StoredResponse | None:
        return next((stored for stored in self._of_owner[owner].values() if not stored.is_running), None)

    def _remove(self, stored: StoredResponse) -> None:
        self._unpin(stored)
        del self._stored[stored.id]
        del self._of_owner[stored.owner][stored.id]
        if not self._of_owner[stored.owner]:
            del self._of_owner[stored.owner]
        self._room.give_back(stored.owner, stored.num_bytes)
        self._let_go(stored.exchange)
        if stored.run is not None:
            stored.run.drop()


def _unpinned_bytes(exchange: Exchange) -> int:
    """What of this conversation no running response holds yet."""
    return sum(each.num_bytes for each in itertools.takewhile(lambda each: each.num_runs == 0, exchange.chain()))


def _check_length(id: str, exchange: Exchange) -> None:
    items, size = exchange.chain_items, exchange.chain_bytes
    if items > MAX_ITEMS or size > MAX_CHAIN_BYTES:
        raise BadRequest(
            f"The conversation that ends with the response {id[:64]!r} has {items} items in {size} bytes, and at most "
            f"{MAX_ITEMS} in {MAX_CHAIN_BYTES} can be continued. Send the part that matters as input.",
            param="previous_response_id",
        )


def _ids(items: Sequence[Json]) -> tuple[str, ...]:
    return tuple(str(item["id"]) for item in items if "id" in item)


def _outputs(response: Json) -> list[Json]:
    outputs = response["output"]
    assert isinstance(outputs, list)
    return outputs
