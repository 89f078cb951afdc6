"""Serve's request router for engine replicas: gives `ostro.routing` what Serve knows and applies its choice. One per
ingress replica.
"""

import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ostro.ray.forwarded_request import NO_KEY, ForwardedRequest
from ostro.routing.key import Key
from ostro.routing.report import Report
from ostro.routing.router import Router

STATS_SECONDS, DIRECT_STATS_SECONDS = 1.0, 0.25
"""Seconds between reports. On the direct path, only reports tell a router that requests have ended."""
REPORT, FINISHED = "report", "finished"
"""Names in Serve's routing statistics: a `Report`, and how many requests of each router have ended. Both are builtins,
because Serve's controller unpickles them, and may run where this package is not installed.
"""


def router_name() -> str:
    """A name for this process, unique among those that choose replicas."""
    return str(ray.get_runtime_context().get_actor_id())


class PrefixRouter(RequestRouter):
    def initialize_state(self) -> None:
        self._router = Router(now=time.monotonic)
        self._by_name: dict[str, RunningReplica] = {}
        self._last_stats: dict[str, Mapping[str, Any]] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        key = next((_key(each) for each in pending_request.args), NO_KEY)
        order = self._router.ranked(key)
        self._router.expect(key, order[0])
        # The last resort is any replica: all of the best few may have refused.
        return [*([self._by_name[name]] for name in order), candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        by_name = {replica.replica_id.unique_id: replica for replica in replicas}
        for name in self._by_name.keys() - by_name.keys():
            self._router.remove(name)
            del self._last_stats[name]
        # Added before any first report: the more replicas there are, the less is read of each report.
        for name in by_name:
            self._router.add(name)
        for name, replica in by_name.items():
            stats = replica.routing_stats
            # Serve repeats a replica's last report whenever another one's changes.
            if stats != self._last_stats.get(name):
                self._take(name, stats)
                self._last_stats[name] = stats
        self._by_name = by_name
        super().update_replicas(replicas)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._router.sent(replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        self._router.finished(replica_id.unique_id)

    def _take(self, name: str, stats: Mapping[str, Any]) -> None:
        self._router.report(name, _report(stats))


class DirectRouter(PrefixRouter):
    """For requests that bypass Serve's handles: only the replicas' reports tell when they have ended."""

    def initialize_state(self) -> None:
        super().initialize_state()
        self._name = router_name()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        chosen = await super().choose_replicas(candidate_replicas, pending_request)
        if pending_request is not None and chosen[0]:
            self._router.sent(chosen[0][0].replica_id.unique_id)
        return chosen

    def on_send_request(self, replica_id: ReplicaID) -> None:
        # Already counted when the replica was chosen.
        RequestRouter.on_send_request(self, replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        RequestRouter.on_request_completed(self, replica_id, internal_request_id)

    def _take(self, name: str, stats: Mapping[str, Any]) -> None:
        self._router.report(name, _report(stats), stats.get(FINISHED, {}).get(self._name, 0))


def _report(stats: Mapping[str, Any]) -> Report:
    """The replica's report; an empty one if it has just started and Serve has none."""
    return Report.from_builtins(stats.get(REPORT, {}))


def _key(argument: object) -> Key:
    if isinstance(argument, ForwardedRequest):
        return argument.key
    return argument if isinstance(argument, Key) else NO_KEY
