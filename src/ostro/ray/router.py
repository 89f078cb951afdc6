"""Serve's request router for engine replicas: gives `placement` what Serve knows and applies its decision. One per
ingress replica.
"""

import random
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ostro.ray.call import Call, Key
from ostro.ray.placement import Candidate, PrefixIndex, ranked

STATS_SECONDS = 1.0
"""How often replicas report which models they have."""
# How long a model counts as loaded where a request for it was sent, before the replica reports it.
_SENT_SECONDS = 10.0
_MOST_SENT = 64


class PrefixRouter(RequestRouter):
    def initialize_state(self) -> None:
        self._index = PrefixIndex()
        self._dice = random.Random()
        self._known: set[str] = set()
        self._open: Counter[str] = Counter()
        # By replica, the models requested from it and when last; the most recent at the end.
        self._sent: defaultdict[str, OrderedDict[str, float]] = defaultdict(OrderedDict)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        key = next((each.key for each in pending_request.args if isinstance(each, Call)), Key())
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        matches = self._index.matches(key.blocks)
        candidates = [self._candidate(replica, key, matches.get(name, 0)) for name, replica in by_id.items()]
        order = ranked(candidates, key.num_history, self._dice)
        self._note(key, order[0])
        return [[by_id[name]] for name in order]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        names = {replica.replica_id.unique_id for replica in replicas}
        if gone := self._known - names:
            self._index.forget(gone)
            for name in gone:
                self._sent.pop(name, None)
            self._open = Counter({name: count for name, count in self._open.items() if name in names})
        self._known = names

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._open[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        self._open[replica_id.unique_id] = max(0, self._open[replica_id.unique_id] - 1)

    def _candidate(self, replica: RunningReplica, key: Key, matched: int) -> Candidate:
        name = replica.replica_id.unique_id
        stats = replica.routing_stats
        # A replica reports its load, over all ingresses, when it accepts a request, so the number is stale in a rush.
        told = self.replica_queue_len_cache.get(replica.replica_id) or 0
        loaded, coming = set(stats.get("models", ())), set(self._lately_sent(name))
        return Candidate(
            replica=name,
            load=max(told, self._open[name]),
            matched=matched,
            has_model=key.model in loaded | coming,
            num_models=stats.get("num_loaded", 0) + len(coming - loaded),
            is_ready=stats.get("ready", True),
        )

    def _lately_sent(self, replica: str) -> Iterator[str]:
        now = time.monotonic()
        return (model for model, at in self._sent[replica].items() if now - at < _SENT_SECONDS)

    def _note(self, key: Key, replica: str) -> None:
        self._index.add(key.blocks, replica)
        sent = self._sent[replica]
        sent[key.model] = time.monotonic()
        sent.move_to_end(key.model)
        # Bounded, because model names are whatever clients send.
        while len(sent) > _MOST_SENT:
            sent.popitem(last=False)
