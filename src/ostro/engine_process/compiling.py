"""Compiles the constraints of waiting requests, in threads beside the engine's loop.

The first one takes a second or more, because it also imports the library and reads the model's vocabulary: an engine
that has nothing else to do compiles one beforehand. A grammar that does not compile fails its own request.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from ostro.engine.constraint import Constraint, Grammars, Prototype
from ostro.engine.request import Request
from ostro.errors import BadRequest, OstroError

_log = logging.getLogger(__name__)

# Compiling competes with the model for the cores.
_MAX_THREADS = 2
# Any grammar will do: what takes long is what all have in common.
_SMALL = Constraint(grammar='start: "a"')


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

    def prepare(self) -> None:
        """Loads what all constraints need, in a compiler thread. If that fails, the first request says why."""
        self._threads.submit(self._prepare)

    def submit(self, request: Request) -> None:
        self._threads.submit(self._compile, request)

    def _prepare(self) -> None:
        with suppress(OstroError):
            self._grammars.prepare(_SMALL)

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
