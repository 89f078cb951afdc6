"""Which models there are: those that were named at the start, and those found under roots, which are looked at again
when a name is missing. Knows names and settings; knows nothing of what is loaded.
"""

import asyncio
import difflib
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ostro.config import EngineConfig
from ostro.errors import BadRequest, DownloadFailed, ModelNotFound, OstroError
from ostro.pool.names import is_name, resolve

_MOST_NAMED = 5
_MOST_SHOWN = 200

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    name: str
    config: EngineConfig
    """How its engine is set up; `config.model` is the reference."""
    pinned: bool = False
    """Whether it is loaded at the start and never evicted."""
    named: bool = True
    """Whether somebody gave it this name; if not, its files may know a better one."""
    adapter: str | None = None
    """For a LoRA adapter: what the engine of its base calls it."""
    base: str | None = None
    """For a LoRA adapter: the name of the model that it sits on."""


class Catalog:
    """Use within one event loop. `make(name, reference)` gives the spec of a model found under a root;
    `list_models(root)` gives names and references, and blocks, so it runs in a thread.
    """

    def __init__(
        self,
        fixed: Sequence[ModelSpec],
        *,
        roots: Sequence[str] = (),
        make: Callable[[str, str], ModelSpec],
        list_models: Callable[[str], Sequence[tuple[str, str]]],
        refresh_seconds: float = 30.0,
    ) -> None:
        self._fixed = {spec.name: spec for spec in fixed}
        if len(self._fixed) < len(fixed):
            names = [spec.name for spec in fixed]
            twice = next(name for name in names if names.count(name) > 1)
            raise BadRequest(f"Two models are called {twice!r}. Give one of them another name.", param="model")
        self.default = fixed[0] if fixed else None
        self._roots = tuple(roots)
        self._make = make
        self._list_models = list_models
        self._refresh_seconds = refresh_seconds
        self._found: dict[str, dict[str, ModelSpec]] = {}
        self._errors: dict[str, OstroError] = {}
        self._specs = dict(self._fixed)
        self._looked_at = -math.inf
        self._looking: asyncio.Task[None] | None = None

    async def find(self, name: str) -> ModelSpec:
        """Raises ModelNotFound, or why a root that may hold the model could not be listed."""
        found = resolve(name, self._specs)
        if found is None and is_name(name):
            await self.refresh_if_old()
            found = resolve(name, self._specs)
        if found is not None:
            return self._specs[found]
        if self._errors and is_name(name):
            # One error is raised many times: it must not collect the traceback of each.
            raise next(iter(self._errors.values())).with_traceback(None)
        raise ModelNotFound(f"There is no model {name[:_MOST_SHOWN]!r}. {self._choice(name)}")

    @property
    def is_fixed(self) -> bool:
        """Whether no other models can turn up."""
        return not self._roots

    async def refresh_if_old(self) -> None:
        """Looks at the roots unless that was done of late."""
        if self._stale():
            await self.refresh()

    async def refresh(self) -> None:
        """Looks at all roots. One that cannot be listed keeps what it had; `find` tells why, should that matter."""
        if not self._roots:
            return
        if self._looking is None:
            self._looking = asyncio.create_task(self._look(), name="catalog")
        # Others wait for the same look: it goes on when one of them leaves.
        await asyncio.shield(self._looking)

    def specs(self) -> list[ModelSpec]:
        """All that are known: first the fixed ones as they were given, then those found, by name."""
        return list(self._specs.values())

    def _stale(self) -> bool:
        return bool(self._roots) and time.monotonic() - self._looked_at >= self._refresh_seconds

    async def _look(self) -> None:
        try:
            listings = [asyncio.to_thread(self._list_models, root) for root in self._roots]
            outcomes = await asyncio.gather(*listings, return_exceptions=True)
            for root, outcome in zip(self._roots, outcomes, strict=True):
                if isinstance(outcome, BaseException):
                    self._errors[root] = _listing_error(root, outcome)
                else:
                    self._errors.pop(root, None)
                    self._found[root] = self._specs_of(root, outcome)
            self._specs = self._merged()
        finally:
            self._looked_at = time.monotonic()
            self._looking = None

    def _specs_of(self, root: str, listing: Sequence[tuple[str, str]]) -> dict[str, ModelSpec]:
        specs = {}
        for name, reference in listing:
            if not is_name(name):
                _log.warning("%r under %s is not served: it is not fit to be a model's name.", name, root)
                continue
            try:
                specs[name] = self._make(name, reference)
            except OstroError as error:
                _log.warning("%s under %s is not served: %s", name, root, error)
        return specs

    def _merged(self) -> dict[str, ModelSpec]:
        found: dict[str, ModelSpec] = {}
        for root in self._roots:
            for name, spec in self._found.get(root, {}).items():
                found.setdefault(name, spec)
        return self._fixed | {name: found[name] for name in sorted(found.keys() - self._fixed.keys())}

    def _choice(self, name: str) -> str:
        if not self._specs:
            return "No models are known here. Check --model and --models."
        names = list(self._specs)
        near = difflib.get_close_matches(name[:_MOST_SHOWN], names, n=_MOST_NAMED, cutoff=0.0)
        more = len(names) - len(near)
        return f"Ask for one of these: {', '.join(near)}{f' (or one of {more} others)' if more else ''}."


def _listing_error(root: str, error: BaseException) -> OstroError:
    _log.warning("%s cannot be listed: %s", root, error)
    if isinstance(error, OstroError):
        return error
    return DownloadFailed(
        f"A place where models are kept cannot be listed ({type(error).__name__}), so it is not known whether there "
        "is such a model. Try again later."
    )
