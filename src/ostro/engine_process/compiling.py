"""Compiles the constraints of waiting requests, in threads beside the engine's loop.

The first one takes a second or so, because it also reads the model's vocabulary. A grammar that does not compile fails
its own request.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from ostro.engine.constraint import Grammars, Prototype
from ostro.engine.request import Request
from ostro.errors import BadRequest, OstroError

_log = logging.getLogger(__name__)

# Compiling competes with the model for the cores.
_MAX_THREADS = 2


class Compiled(NamedTuple):
    request: Request
    prototype: Prototype | None
    error: OstroError | None = None
    """Why compiling failed."""


class ConstraintCompiler:
    def __init__(self, grammars: Grammars, deliver: Callable[[Compiled], None]) -> None:
        """`deliver` is called from a compiler thread. No thread starts before the first request."""
        self._grammars, self._deliver = grammars, deliver
        self._threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="grammar")

    def submit(self, request: Request) -> None:
        self._threads.submit(self._compile, request)

    def _compile(self, request: Request) -> None:
        assert request.constraint is not None
        try:
            self._deliver(Compiled(request, self._grammars.prepare(request.constraint)))
        except OstroError as error:
            self._deliver(Compiled(request, None, error))
        # The library is written in Rust: its panics are not Exceptions.
        except BaseException:  # noqa: BLE001
            _log.exception("A grammar could not be compiled.")
            failure = BadRequest("The structured output cannot be compiled. Simplify it.", param="structured")
            self._deliver(Compiled(request, None, failure))
