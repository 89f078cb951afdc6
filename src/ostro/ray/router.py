"""Serve's request router for engine replicas: gives `ostro.routing` what Serve knows and applies its choice. One per
ingress replica.
"""

import time

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ostro.ray.call import NO_KEY, Call
from ostro.routing.router import Report, Router

STATS_SECONDS = 1.0
"""How often replicas report."""
REPORT = "report"
"""The name of a `Report` in Serve's routing statistics."""


class PrefixRouter(RequestRouter):
    def initialize_state(self) -> None:
        self._router = Router(now=time.monotonic)
        self._by_name: dict[str, RunningReplica] = {}
        self._reports: dict[str, Report] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        key = next((each.key for each in pending_request.args if isinstance(each, Call)), NO_KEY)
        order = self._router.ranked(key)
        self._router.expect(key, order[0])
        # The last resort is any replica: all of the best few may have refused.
        return [*([self._by_name[name]] for name in order), candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        by_name = {replica.replica_id.unique_id: replica for replica in replicas}
        for name in self._by_name.keys() - by_name.keys():
            self._router.remove(name)
        for name, replica in by_name.items():
            report = replica.routing_stats.get(REPORT, Report())
            # Serve repeats a replica's last report whenever another one's changes.
            if name not in self._router or report != self._reports.get(name):
                self._router.report(name, report)
        self._reports = {name: each.routing_stats.get(REPORT, Report()) for name, each in by_name.items()}
        self._by_name = by_name
        super().update_replicas(replicas)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._router.sent(replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        self._router.finished(replica_id.unique_id)
