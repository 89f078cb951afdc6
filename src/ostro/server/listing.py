"""The server's entry in `ostro ps`: kept up to date while it runs, and gone when it has ended. Knows files; starts
nothing.
"""

import os
import time

from ostro.pool.pool import PoolState
from ostro.server.admission.limits import Gate
from ostro.server.models.served import Models
from ostro.system.processes import identity
from ostro.system.server_records import OwnRecord, ServedModel, ServerRecord, records_directory
from ostro.version import __version__


class Listing:
    """Call `tell` repeatedly: it writes the file if something has changed."""

    def __init__(self, models: Models, gate: Gate, *, url: str, has_keys: bool, drain_seconds: float) -> None:
        self._models = models
        self._gate = gate
        self._url = url
        self._has_keys = has_keys
        self._drain_seconds = drain_seconds
        self._started = time.time()
        self._identity = identity(os.getpid())
        self._own = OwnRecord(records_directory())

    def tell(self, *, draining: bool = False) -> None:
        if self._identity is None:
            # This system does not tell processes apart.
            return
        self._own.write(
            ServerRecord(
                pid=os.getpid(),
                identity=self._identity,
                url=self._url,
                version=__version__,
                started=self._started,
                state="draining" if draining else self._models.state.value,
                has_keys=self._has_keys,
                drain_seconds=self._drain_seconds,
                models=self._served(),
                requests_left=self._gate.num_inside if draining else None,
            )
        )

    def remove(self) -> None:
        self._own.remove()

    def _served(self) -> tuple[ServedModel, ...]:
        views = [view for view in self._models.pool.touched() if view.state is not PoolState.AVAILABLE]
        return tuple(ServedModel(self._models.shown(view.spec), view.state.value, view.device_bytes) for view in views)
