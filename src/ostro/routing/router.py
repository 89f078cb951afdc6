"""Chooses a replica for a request: one that has its model loaded and its prefix computed, unless that one is much
busier than another. The choice takes the same time whatever the number of replicas.

A choice looks at a few candidates: those known to hold the prefix, and a few drawn by chance from all replicas and from
those with the model. Up to `_DRAWN` replicas, that is all of them. With more, the least busy of a random few is nearly
as good as the least busy of all, and better if several routers choose at once by reports that are a little old.
"""

import random
from collections import OrderedDict
from collections.abc import Callable

from ostro.routing.key import Key
from ostro.routing.prefix_index import MOST_PREFIXES, PrefixIndex
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
        self, *, now: Callable[[], float], dice: random.Random | None = None, most_prefixes: int = MOST_PREFIXES
    ) -> None:
        """`now` is a clock, in seconds."""
        self._now = now
        self._dice = dice or random.Random()
        self._index = PrefixIndex(most_prefixes)
        self._most_prefixes = most_prefixes
        self._replicas: dict[str, _Replica] = {}
        self._ready, self._restarting = _Group(), _Group()
        # Of replicas that are ready, those that have a model or were asked for it lately.
        self._with_model: dict[str, _Group] = {}

    def __len__(self) -> int:
        return len(self._replicas)

    def __contains__(self, replica: str) -> bool:
        return replica in self._replicas

    def add(self, replica: str) -> None:
        """Of a replica that is already there, nothing changes."""
        if replica not in self._replicas:
            self._replicas[replica] = _Replica()
            self._ready.add(replica)

    def remove(self, replica: str) -> None:
        # The index may still name it, and is not asked about it any more.
        if (gone := self._replicas.pop(replica, None)) is not None:
            self._leave(replica, gone)

    def report(self, replica: str, report: Report, num_ended: int | None = None) -> None:
        """Adds the replica if it is new. `num_ended` requests that were sent to it have ended so far, if ends are told
        this way and not one by one.
        """
        self.add(replica)
        state = self._replicas[replica]
        state.take(report, self._now(), num_ended)
        names = {*report.models, *state.coming}
        if names != state.names or report.is_ready != state.is_ready:
            self._leave(replica, state)
            state.is_ready = report.is_ready
            (self._ready if state.is_ready else self._restarting).add(replica)
            for name in names:
                self._have(replica, state, name)
        # What replicas held before this router came may fill half of the index.
        share = max(1, self._most_prefixes // (2 * len(self._replicas)))
        self._index.add(report.held.since(state.num_held, share), replica)
        for prefix in report.dropped.since(state.num_dropped):
            self._index.discard(prefix, replica)
        state.num_held, state.num_dropped = report.held.num_ever, report.dropped.num_ever

    def load(self, replica: str) -> float:
        """Its requests, as far as is known."""
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
        matches = self._index.matches(key.blocks[: key.num_history], self._replicas)
        names = {*matches, *self._drawn(self._ready if self._ready.names else self._restarting)}
        with_model = self._with_model.get(key.model)
        if with_model is not None and len(with_model.names) < len(self._ready.names):
            names.update(self._drawn(with_model))
        now = self._now()
        candidates = [(name, state := self._replicas[name], state.load(now), matches.get(name, 0)) for name in names]
        least = min([load for _, state, load, _ in candidates if state.is_ready], default=0)
        too_much, worth = _MUCH_MORE * least + _SOME_MORE, max(1, _LEAST_SHARE * key.num_history)
        model, dice = key.model, self._dice.random
        ranks = [
            (
                not state.is_ready,
                load > too_much,
                model not in state.names,
                -matched if matched >= worth else 0,
                load,
                # Tie-breakers: minor preferences, then chance.
                -matched,
                state.num_models + len(state.coming),
                dice(),
                name,
            )
            for name, state, load, matched in candidates
        ]
        ranks.sort()
        return [rank[-1] for rank in ranks]

    def sent(self, replica: str) -> None:
        """A request is on its way."""
        if (state := self._replicas.get(replica)) is not None:
            state.open += 1
            state.fresh += 1

    def expect(self, key: Key, replica: str) -> None:
        """The prefix and the model of a request will be where it goes."""
        state = self._replicas.get(replica)
        if state is None:
            return
        self._index.add_prompt(key.blocks, replica)
        if key.model in state.names and key.model not in state.coming:
            return
        state.coming[key.model] = self._now()
        state.coming.move_to_end(key.model)
        if key.model not in state.names:
            self._have(replica, state, key.model)
            # Bounded, because model names are whatever clients send.
            if len(state.coming) > _MOST_COMING:
                self._lack(replica, state, state.coming.popitem(last=False)[0])

    def finished(self, replica: str, count: int = 1) -> None:
        """Requests that were sent have ended."""
        if (state := self._replicas.get(replica)) is not None:
            state.open = max(0, state.open - count)

    def _drawn(self, group: "_Group") -> list[str]:
        names, count, dice = group.names, len(group.names), self._dice.random
        return names if count <= _DRAWN else [names[int(dice() * count)] for _ in range(_DRAWN)]

    def _leave(self, replica: str, state: "_Replica") -> None:
        self._ready.discard(replica)
        self._restarting.discard(replica)
        for name in list(state.names):
            self._lack(replica, state, name)

    def _have(self, replica: str, state: "_Replica", model: str) -> None:
        state.names.add(model)
        if state.is_ready:
            self._with_model.setdefault(model, _Group()).add(replica)

    def _lack(self, replica: str, state: "_Replica", model: str) -> None:
        state.names.discard(model)
        if (group := self._with_model.get(model)) is not None:
            group.discard(replica)
            if not group.names:
                del self._with_model[model]


class _Replica:
    __slots__ = (
        "coming",
        "ends_per_second",
        "fresh",
        "is_ready",
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

    def __init__(self) -> None:
        self.is_ready = True
        # The load of the last report, when it came, and how long after the one before.
        self.told = 0
        self.told_at = self.told_after = 0.0
        self.ends_per_second = 0.0
        self.open = 0
        """Requests that this router sent and that have not ended, as far as it knows."""
        # Requests sent since the last report, and between that one and the one before.
        self.fresh = self.settling = 0
        self.names: set[str] = set()
        """Models that it has loaded, or will have."""
        self.num_models = 0
        # What it has told so far, so that the next report is read from there.
        self.num_held = self.num_dropped = self.num_ended = 0
        # Models that it was asked for before it had them, and when; the latest last.
        self.coming: OrderedDict[str, float] = OrderedDict()

    def load(self, now: float) -> float:
        if not self.ends_per_second:
            return self.told if self.told > self.open else self.open
        # Until the next report, requests are assumed to end as fast as before it.
        ended = self.ends_per_second * min(now - self.told_at, 2 * self.told_after)
        return max(self.told, self.open - ended)

    def take(self, report: Report, now: float, num_ended: int | None) -> None:
        self.told, self.told_at, self.told_after = report.load, now, now - self.told_at
        if num_ended is not None:
            # A replica that has forgotten this router starts to count again.
            ended = num_ended - self.num_ended if num_ended >= self.num_ended else num_ended
            self.num_ended = num_ended
            self.open = max(0, self.open - ended)
            self.ends_per_second = ended / self.told_after if self.told_after else 0.0
        # Open requests are among those it reports, except some that were just sent: the others were lost on the way.
        self.open = min(self.open, report.load + self.fresh + self.settling)
        self.settling, self.fresh = self.fresh, 0
        self.num_models = report.num_models
        lost = now - _COMING_SECONDS
        for name in [each for each, at in self.coming.items() if at < lost or each in report.models]:
            del self.coming[name]


class _Group:
    """Names that can be drawn by chance, added and discarded, each in constant time."""

    __slots__ = ("_places", "names")

    def __init__(self) -> None:
        self.names: list[str] = []
        self._places: dict[str, int] = {}

    def add(self, name: str) -> None:
        if name not in self._places:
            self._places[name] = len(self.names)
            self.names.append(name)

    def discard(self, name: str) -> None:
        if (place := self._places.pop(name, None)) is not None:
            last = self.names.pop()
            if last != name:
                self.names[place] = last
                self._places[last] = place
