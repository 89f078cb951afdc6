"""Which model to load next and which to evict for it. Reads the entries and changes nothing, so it can be called any
time.

Models that requests wait for are ordered by their oldest waiting request; a key for which another model was loaded
meanwhile waits from then, so that keys take turns however many models one of them asks for. For each in turn:

    its files are not here ───────────> download them: takes no memory, so nothing needs to be evicted
    it fits ──────────────────────────> load
    evicting idle models suffices ────> evict them, least recently used first
    only busy ones would suffice ─────> after some patience, drain them, least recently loaded first; then evict
    pinned ones leave no room ────────> refuse

Memory for the first model is reserved: those behind it get only what is left. A draining model is kept after all if it
is no longer in the way, because the requests it should make room for are gone or found room elsewhere.

Two rules prevent thrashing. A busy model is not drained before it has been ready for as long as its load took, so at
least half of the time goes into work. And until then a model also counts as busy for a moment after its last request,
because a client that sends one request after another leaves short gaps.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic

from ostro.errors import ModelError, OstroError, Unavailable
from ostro.pool.budget import PoolLimits, Room, together
from ostro.pool.entry import Entry, PoolState, S

# A gap between requests, as a share of the time that a swap takes.
_GAP = 0.1
_RETRY_PINNED = 30


@dataclass(slots=True)
class Decisions(Generic[S]):
    find: list[Entry[S]] = field(default_factory=list)
    """Models whose files should be looked for locally."""
    fetch: list[Entry[S]] = field(default_factory=list)
    abandon: list[Entry[S]] = field(default_factory=list)
    """Downloads that nobody waits for any more, while other downloads are waiting."""
    expect: list[Entry[S]] = field(default_factory=list)
    """Models whose memory use should be estimated first."""
    load: list[Entry[S]] = field(default_factory=list)
    evict: list[Entry[S]] = field(default_factory=list)
    drain: list[Entry[S]] = field(default_factory=list)
    """All models that should be draining now, including those that already are."""
    refuse: list[tuple[Entry[S], OstroError]] = field(default_factory=list)
    again_at: float = math.inf
    """When to decide again if nothing happens before."""


def decide(
    entries: Collection[Entry[S]],
    limits: PoolLimits,
    *,
    turns: Mapping[str | None, float],
    needs_files: bool = False,
    patience: float,
    now: float,
) -> Decisions[S]:
    """With `needs_files`, models are loaded from files, which must be found or downloaded first. `turns` says when a
    model was last loaded for each key.
    """
    decisions: Decisions[S] = Decisions()
    line = _line(entries, turns, now)
    if needs_files:
        _bring(line, entries, limits, decisions, now)
        line = [place for place in line if place[0].files is not None]
    residents = [entry for entry in entries if entry.resident]
    staying = [entry for entry in residents if not entry.leaving]
    pinned = together(entry.room for entry in staying if entry.pinned)
    movable = [entry for entry in staying if not entry.pinned and entry.ready_at is not None]
    taken = together(entry.room for entry in residents)
    promised = together(entry.room for entry in staying)
    guessing = any(entry.footprint is None for entry in residents)
    for entry, since in line:
        if limits.by_memory and entry.footprint is None and not entry.expected:
            decisions.expect.append(entry)
            continue
        if (error := too_large(entry, limits) or _pinned_out(entry, pinned, limits)) is not None:
            decisions.refuse.append((entry, error))
            continue
        chosen = _choose(movable, promised + entry.room, limits, now)
        if chosen is None:
            # Models that are loading must settle first.
            break
        promised = promised + entry.room - together(other.room for other in chosen)
        movable = [other for other in movable if other not in chosen]
        if chosen:
            _clear(chosen, decisions, since=since, patience=patience, now=now)
        elif (taken + entry.room).within(limits) and not (limits.by_memory and guessing and entry.footprint is None):
            # Models of unknown size are loaded one at a time, so that only one can exceed the limit.
            decisions.load.append(entry)
            taken = taken + entry.room
            guessing = guessing or entry.footprint is None
    return decisions


def too_large(entry: Entry[S], limits: PoolLimits) -> ModelError | None:
    """Why it could not be loaded even on its own."""
    beyond = entry.room.beyond(limits)
    if beyond is None:
        return None
    return ModelError(
        f"{entry.name} needs {beyond}. Raise the budget (--memory-budget, --gpu-memory-budget), lower --kv-memory, or "
        "serve a smaller model."
    )


def idle_for(entry: Entry[S], entries: Sequence[Entry[S]], limits: PoolLimits) -> list[Entry[S]] | None:
    """Idle models to evict because the loaded `entry` turned out larger than expected; None if that would not
    suffice.
    """
    staying = [other for other in entries if other.resident and not other.leaving]
    idle = [other for other in staying if other is not entry and _movable(other) and other.idle]
    return _fewest(_by_use(idle), together(other.room for other in staying), limits)


def _line(entries: Iterable[Entry[S]], turns: Mapping[str | None, float], now: float) -> list[tuple[Entry[S], float]]:
    waited_for = [
        (entry, place)
        for entry in entries
        if entry.state is PoolState.AVAILABLE and not entry.resident and (place := entry.place(now, turns)) is not None
    ]
    waited_for.sort(key=lambda waiting: (waiting[1].turn, waiting[1].since))
    return [(entry, place.since) for entry, place in waited_for]


def _bring(
    line: Sequence[tuple[Entry[S], float]],
    entries: Iterable[Entry[S]],
    limits: PoolLimits,
    decisions: Decisions[S],
    now: float,
) -> None:
    """Plans how the queued models' files get here. A download that nobody waits for continues until others need its
    place.
    """
    under_way = [entry for entry in entries if entry.fetching]
    ending = [entry for entry in under_way if entry.bringing is not None and entry.bringing.cancelling()]
    unwanted = [entry for entry in under_way if entry not in ending and entry.waiting_since(now) is None]
    num_free, num_freed = limits.fetches - len(under_way), len(ending)
    for entry, _ in line:
        if entry.files is not None or entry.bringing is not None:
            continue
        if not entry.absent:
            decisions.find.append(entry)
        elif num_free > 0:
            decisions.fetch.append(entry)
            num_free -= 1
        elif num_freed > 0:
            num_freed -= 1
        elif unwanted:
            decisions.abandon.append(unwanted.pop(0))


def _pinned_out(entry: Entry[S], pinned: Room, limits: PoolLimits) -> Unavailable | None:
    beyond = (pinned + entry.room).beyond(limits)
    if beyond is None:
        return None
    return Unavailable(
        f"There is no room for {entry.name} beside the pinned models: together they need {beyond}. "
        "Raise --memory-budget or MAX_CACHED_MODELS, or unpin a model.",
        retry_after=_RETRY_PINNED,
    )


def _movable(entry: Entry[S]) -> bool:
    return not entry.pinned and entry.ready_at is not None


def _choose(movable: Sequence[Entry[S]], total: Room, limits: PoolLimits, now: float) -> list[Entry[S]] | None:
    """Models to evict so that `total` is within the limits; None if evicting all would not suffice."""
    idle = _by_use(entry for entry in movable if entry.idle)
    busy = sorted(
        (entry for entry in movable if not entry.idle),
        key=lambda entry: (entry.state is not PoolState.DRAINING, max(0.0, _ripe_at(entry) - now), entry.ready_at),
    )
    return _fewest([*idle, *busy], total, limits)


def _by_use(idle: Iterable[Entry[S]]) -> list[Entry[S]]:
    """Least recently used first; drained ones before all others."""
    return sorted(idle, key=lambda entry: (entry.state is not PoolState.DRAINING, entry.last_use()))


def _fewest(order: Iterable[Entry[S]], total: Room, limits: PoolLimits) -> list[Entry[S]] | None:
    chosen: list[Entry[S]] = []
    for entry in order:
        if total.within(limits):
            break
        chosen.append(entry)
        total = total - entry.room
    return chosen if total.within(limits) else None


def _clear(chosen: Sequence[Entry[S]], decisions: Decisions[S], *, since: float, patience: float, now: float) -> None:
    """Plans the eviction of the chosen models for a model that requests wait for."""
    times = [_quiet_at(entry, patience) if entry.idle else max(since + patience, _ripe_at(entry)) for entry in chosen]
    if all(entry.idle for entry in chosen) and max(times) <= now:
        decisions.evict.extend(chosen)
        return
    for entry, time in zip(chosen, times, strict=True):
        if entry.state is PoolState.DRAINING or (time <= now and not entry.idle):
            decisions.drain.append(entry)
        elif time > now:
            decisions.again_at = min(decisions.again_at, time)


def _ripe_at(entry: Entry[S]) -> float:
    """When it has been ready for as long as its load took."""
    assert entry.ready_at is not None
    return entry.ready_at + (entry.load_seconds or 0.0)


def _quiet_at(entry: Entry[S], patience: float) -> float:
    """When an idle model no longer counts as being between two requests."""
    if entry.state is PoolState.DRAINING:
        return -math.inf
    gap = min(patience, _GAP * (entry.load_seconds or 0.0))
    quiet_at = min(entry.last_use() + gap, _ripe_at(entry))
    return quiet_at if entry.promise is None else max(quiet_at, entry.promise.until)
