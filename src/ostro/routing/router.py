"""Chooses a replica for a request: one that has its model loaded and its prefix computed, unless that one is much
busier than another. The choice takes the same time whatever the number of replicas.

A choice looks at a few candidates: those known to hold the prefix, and a few drawn at random from all replicas and from
those with the model. Up to `_DRAWN` replicas, that is all of them. With more, the least busy of a random few is nearly
as good as the least busy of all, and better if several routers choose at once from slightly stale reports.
"""

import random
from collections.abc import Callable

from ostro.routing.key import Key
from ostro.routing.prefix_index import PrefixIndex
from ostro.routing.report import Report

# A replica is too busy if its load exceeds the lowest by both this factor and this number of requests.
_MUCH_MORE, _SOME_MORE = 1.5, 8
# Shorter matches are not worth queueing for: every conversation may start with the same few words.
_LEAST_SHARE = 0.5
_DRAWN = 4
# How long a model counts as loaded where a request for it was sent, before the replica reports it.
_COMING_SECONDS = 10.0
_MOST_COMING = 64


class Router:
    def __init__(
        self, *, now: Callable[[], float], dice: random.Random | None = None, index: PrefixIndex | None = None
    ) -> None:
        """`now` is a clock, in seconds. `index` is where the router remembers prefixes; by default a new one."""
        self._now = now
        self._dice = dice or random.Random()
        self._index = PrefixIndex() if index is None else index
        self._replicas: dict[str, _Replica] = {}
        self._ready, self._restarting = _Group(), _Group()
        # Model -> the ready replicas that have it or were recently asked for it.
        self._with_model: dict[str, _Group] = {}

    def __len__(self) -> int:
        return len(self._replicas)

    def __contains__(self, replica: str) -> bool:
        return replica in self._replicas

    def add(self, replica: str) -> None:
        """Adds a replica; does nothing if it is already there."""
        if replica not in self._replicas:
            state = self._replicas[replica] = _Replica(replica)
            self._ready.add(state)

    def remove(self, replica: str) -> None:
        # The index may still name it, but is not asked about it any more.
        if (gone := self._replicas.pop(replica, None)) is not None:
            self._leave(gone)

    def report(self, replica: str, report: Report, num_ended: int | None = None) -> None:
        """Takes a replica's report, adding the replica if it is new. `num_ended` is how many requests sent to it have
        ended so far, if ends are reported this way and not one by one.

        What replicas hold at their first reports fills at most half of the index, if all were added before.
        """
        self.add(replica)
        state = self._replicas[replica]
        state.take(report, self._now(), num_ended)
        names = {*report.models, *state.coming}
        if names != state.names or report.is_ready != state.is_ready:
            self._leave(state)
            state.is_ready = report.is_ready
            (self._ready if state.is_ready else self._restarting).add(state)
            for name in names:
                self._have(state, name)
        if state.num_held is None:
            share = max(1, self._index.most_prefixes // (2 * len(self._replicas)))
            self._index.add(report.held.since(0, share), replica)
        else:
            self._index.add(report.held.since(state.num_held), replica)
        for prefix in report.dropped.since(state.num_dropped):
            self._index.discard(prefix, replica)
        state.num_held, state.num_dropped = report.held.num_ever, report.dropped.num_ever

    def load(self, replica: str) -> float:
        """The replica's requests, as far as is known."""
        return self._replicas[replica].load(self._now())

    def choose(self, key: Key) -> str | None:
        """The best replica, to which the request counts as sent; None if there is no replica."""
        best = next(iter(self.ranked(key)), None)
        if best is not None:
            self.expect(key, best)
            self.sent(best)
        return best

    def ranked(self, key: Key) -> list[str]:
        """The best few replicas, best first: at least one if there is any."""
        model, replicas, ready, dice = key.model, self._replicas, self._ready.members, self._dice.random
        candidates = dict.fromkeys(self._drawn(self._ready if ready else self._restarting), 0)
        with_model = self._with_model.get(model)
        is_everywhere = with_model is not None and len(with_model.members) == len(ready)
        if with_model is not None and not is_everywhere:
            candidates |= dict.fromkeys(self._drawn(with_model), 0)
        for name, matched in self._index.matches(key.blocks[: key.num_history], replicas).items():
            candidates[replicas[name]] = matched
        now = self._now()
        loads = [state.load(now) for state in candidates]
        least = min([load for state, load in zip(candidates, loads, strict=True) if state.is_ready], default=0)
        too_much, worth = _MUCH_MORE * least + _SOME_MORE, max(1, _LEAST_SHARE * key.num_history)
        ranks = [
            (
                not state.is_ready,
                load > too_much,
                not is_everywhere and model not in state.names,
                -matched if matched >= worth else 0,
                load,
                # Tie-breakers: minor preferences, then chance.
                -matched,
                state.num_models,
                dice(),
                state.name,
            )
            for (state, matched), load in zip(candidates.items(), loads, strict=True)
        ]
        ranks.sort()
        return [rank[-1] for rank in ranks]

    def sent(self, replica: str) -> None:
        """Notes that a request is on its way."""
        if (state := self._replicas.get(replica)) is not None:
            state.open += 1
            state.fresh += 1

    def expect(self, key: Key, replica: str) -> None:
        """Notes that the replica will soon have the request's prefix and model."""
        state = self._replicas.get(replica)
        if state is None:
            return
        self._index.add_prompt(key.blocks, replica)
        coming, model = state.coming, key.model
        if model in state.names and model not in coming:
            return
        coming.pop(model, None)
        coming[model] = self._now()
        if model not in state.names:
            self._have(state, model)
            state.num_models += 1
            # Bounded, because model names are whatever clients send.
            if len(coming) > _MOST_COMING:
                oldest = next(iter(coming))
                del coming[oldest]
                self._lack(state, oldest)
                state.num_models -= 1

    def finished(self, replica: str, count: int = 1) -> None:
        """Notes that requests sent to the replica have ended."""
        if (state := self._replicas.get(replica)) is not None:
            state.open = max(0, state.open - count)

    def _drawn(self, group: "_Group") -> list["_Replica"]:
        members, count, dice = group.members, len(group.members), self._dice.random
        return members if count <= _DRAWN else [members[int(dice() * count)] for _ in range(_DRAWN)]

    def _leave(self, state: "_Replica") -> None:
        self._ready.discard(state)
        self._restarting.discard(state)
        for name in list(state.names):
            self._lack(state, name)

    def _have(self, state: "_Replica", model: str) -> None:
        state.names.add(model)
        if state.is_ready:
            self._with_model.setdefault(model, _Group()).add(state)

    def _lack(self, state: "_Replica", model: str) -> None:
        state.names.discard(model)
        if (group := self._with_model.get(model)) is not None:
            group.discard(state)
            if not group.members:
                del self._with_model[model]


class _Replica:
    __slots__ = (
        "coming",
        "ends_per_second",
        "fresh",
        "is_ready",
        "name",
        "names",
        "num_dropped",
        "num_ended",
        "num_held",
        "num_models",
        "open",
        "settling",
        "told",
        "told_after",
        "told_at",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_ready = True
        # The load in the last report, when that report came, and how long after the one before.
        self.told = 0
        self.told_at = self.told_after = 0.0
        self.ends_per_second = 0.0
        self.open = 0
        """Requests that this router sent and that have not ended, as far as it knows."""
        # Requests sent since the last report, and between the last two reports.
        self.fresh = self.settling = 0
        self.names: set[str] = set()
        """Names of models that it has loaded, or soon will have."""
        self.num_models = 0
        """Loaded models, each counted once however many names it has."""
        # How far its reports have been read.
        self.num_held: int | None = None
        """None before its first report."""
        self.num_dropped = self.num_ended = 0
        # Models requested from it before it had them, and when; latest last.
        self.coming: dict[str, float] = {}

    def load(self, now: float) -> float:
        if not self.ends_per_second:
            return self.told if self.told > self.open else self.open
        # Until the next report, requests are assumed to end as fast as before it.
        ended = self.ends_per_second * min(now - self.told_at, 2 * self.told_after)
        return max(self.told, self.open - ended)

    def take(self, report: Report, now: float, num_ended: int | None) -> None:
        self.told, self.told_at, self.told_after = report.load, now, now - self.told_at
        if num_ended is not None:
            # A replica that has forgotten this router counts from zero.
            ended = num_ended - self.num_ended if num_ended >= self.num_ended else num_ended
            self.num_ended = num_ended
            self.open = max(0, self.open - ended)
            self.ends_per_second = ended / self.told_after if self.told_after else 0.0
        # Open requests are among those it reports, except some that were just sent: the others were lost on the way.
        self.open = min(self.open, report.load + self.fresh + self.settling)
        self.settling, self.fresh = self.fresh, 0
        lost = now - _COMING_SECONDS
        for name in [each for each, at in self.coming.items() if at < lost or each in report.models]:
            del self.coming[name]
        self.num_models = report.num_models + len(self.coming)


class _Group:
    """Replicas that can be drawn at random, added and discarded, each in constant time."""

    __slots__ = ("_places", "members")

    def __init__(self) -> None:
        self.members: list[_Replica] = []
        self._places: dict[_Replica, int] = {}

    def add(self, replica: _Replica) -> None:
        if replica not in self._places:
            self._places[replica] = len(self.members)
            self.members.append(replica)

    def discard(self, replica: _Replica) -> None:
        if (place := self._places.pop(replica, None)) is not None:
            last = self.members.pop()
            if last is not replica:
                self.members[place] = last
                self._places[last] = place
