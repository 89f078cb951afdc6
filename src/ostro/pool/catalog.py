"""Which models exist: those named at startup, and those found under roots, which are listed again when a name is
missing; and which model each adapter found there belongs to. Knows names and settings; knows nothing about what is
loaded.
"""

import asyncio
import difflib
import logging
import math
import threading
import time
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from ostro.config import EngineConfig, is_name
from ostro.errors import BadRequest, DownloadFailed, OstroError, UnknownModel

_MOST_NAMED = 5
_MOST_SHOWN = 200
# A name is compared with this many neighbours on either side in alphabetical order.
_NEIGHBOURS = 10

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    name: str
    config: EngineConfig
    """Its engine's settings; `config.model` is the reference."""
    pinned: bool = False
    """Whether it is loaded at startup and never evicted."""
    adapter: str | None = None
    """For a LoRA adapter: its name in the base model's engine."""
    base: str | None = None
    """For a LoRA adapter: the name of its base model."""


class Found(Protocol):
    """A model or adapter found under a root."""

    @property
    def name(self) -> str: ...


F = TypeVar("F", bound=Found)


class Catalog:
    """Use within one event loop. `list_models(root)` lists a root, and `make` builds the spec of each entry; an
    adapter's has the base as the adapter names it in `base`, and the adapter's location in `config.model`. Both may
    block: they run in a thread. A refresh ends after `list_seconds`; a root that answers later still counts.
    """

    def __init__(
        self,
        fixed: Sequence[ModelSpec],
        *,
        roots: Sequence[str] = (),
        make: Callable[[F], ModelSpec],
        list_models: Callable[[str], Sequence[F]],
        refresh_seconds: float = 30.0,
        list_seconds: float = 30.0,
    ) -> None:
        self._fixed = {spec.name: spec for spec in fixed}
        if len(self._fixed) < len(fixed):
            names = [spec.name for spec in fixed]
            twice = next(name for name in names if names.count(name) > 1)
            raise BadRequest(f"Two models are called {twice!r}. Give one of them another name.", param="model")
        self.default = fixed[0] if fixed else None
        self._roots = tuple(roots)

        def list_specs(root: str) -> dict[str, ModelSpec]:
            return self._specs_of(root, list_models(root), make)

        self._list_specs = list_specs
        self._refresh_seconds = refresh_seconds
        self._list_seconds = list_seconds
        self._found: dict[str, dict[str, ModelSpec]] = {}
        self._errors: dict[str, OstroError] = {}
        self._specs = dict(self._fixed)
        self._names = sorted(self._specs)
        self._told: set[tuple[str, str, str]] = set()
        self._looked_at = -math.inf
        self._looking: asyncio.Task[None] | None = None
        self._listings: dict[str, asyncio.Future[None]] = {}

    async def find(self, name: str) -> ModelSpec:
        """Raises UnknownModel, or the error that kept a root that may hold the model from being listed."""
        found = resolve(name, self._specs)
        if found is None and is_name(name):
            await self.refresh_if_old()
            found = resolve(name, self._specs)
        if found is not None:
            return self._specs[found]
        if self._errors and is_name(name):
            # The same error is raised repeatedly: it must not accumulate tracebacks.
            raise next(iter(self._errors.values())).with_traceback(None)
        raise UnknownModel(f"There is no model {name[:_MOST_SHOWN]!r}. {self._choice(name)}")

    @property
    def is_fixed(self) -> bool:
        """Whether no other models can appear."""
        return not self._roots

    @property
    def is_whole(self) -> bool:
        """Whether every root was listed at least once."""
        return all(root in self._found for root in self._roots)

    async def refresh_if_old(self, *, wait_seconds: float | None = None) -> None:
        """Lists the roots unless that was done recently. The refresh continues if it takes longer than the wait."""
        if self._stale():
            await asyncio.wait([self._begin_look()], timeout=wait_seconds)

    async def refresh(self) -> None:
        """Lists all roots. One that cannot be listed keeps its known models; `find` raises the reason if it matters."""
        if self._roots:
            await asyncio.wait([self._begin_look()])

    def close(self) -> None:
        """Abandons a refresh in progress. Those waiting for it continue with what is known."""
        if self._looking is not None:
            self._looking.cancel()

    def specs(self) -> list[ModelSpec]:
        """All known models: first the fixed ones in their given order, then those found, by name."""
        return list(self._specs.values())

    def _stale(self) -> bool:
        return bool(self._roots) and time.monotonic() - self._looked_at >= self._refresh_seconds

    def _begin_look(self) -> asyncio.Task[None]:
        """Waiters share one refresh, which continues when any of them leaves."""
        if self._looking is None:
            self._looking = asyncio.create_task(self._look(), name="catalog")
        return self._looking

    async def _look(self) -> None:
        try:
            listings = {root: self._listing(root) for root in self._roots}
            await asyncio.wait(listings.values(), timeout=self._list_seconds)
            for root, listing in listings.items():
                if not listing.done():
                    self._errors[root] = _listing_error(root, TimeoutError(f"no answer in {self._list_seconds:g} s"))
        finally:
            self._looked_at = time.monotonic()
            self._looking = None

    def _listing(self, root: str) -> asyncio.Future[None]:
        """Done once the root's models are known, or why they are not. A slow listing is never started twice."""
        if (under_way := self._listings.get(root)) is not None:
            return under_way
        loop = asyncio.get_running_loop()
        listing = self._listings[root] = loop.create_future()

        def take(outcome: dict[str, ModelSpec] | Exception) -> None:
            del self._listings[root]
            self._take(root, outcome)
            listing.set_result(None)

        def run() -> None:
            outcome: dict[str, ModelSpec] | Exception
            try:
                outcome = self._list_specs(root)
            except Exception as error:  # noqa: BLE001
                outcome = error
            # The loop may have ended meanwhile.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(take, outcome)

        # Not from a thread pool: a process waits for its threads on exit, and a root may not answer for minutes.
        threading.Thread(target=run, name=f"list {root}", daemon=True).start()
        return listing

    def _take(self, root: str, outcome: dict[str, ModelSpec] | Exception) -> None:
        if isinstance(outcome, Exception):
            self._errors[root] = _listing_error(root, outcome)
            return
        self._errors.pop(root, None)
        self._found[root] = outcome
        self._specs = self._merged()
        self._names = sorted(self._specs)

    def _specs_of(self, root: str, listing: Sequence[F], make: Callable[[F], ModelSpec]) -> dict[str, ModelSpec]:
        specs: dict[str, ModelSpec] = {}
        for found in listing:
            name = found.name
            if not is_name(name):
                self._tell(root, repr(name), "this is not a valid model name.")
            elif name in specs:
                self._tell(root, name, "there is another one with that name. Rename one.")
            else:
                try:
                    specs[name] = make(found)
                except OstroError as error:
                    self._tell(root, name, error.message)
                except Exception:  # noqa: BLE001
                    _log.exception("%s under %s is not served: its settings cannot be read.", name, root)
        return specs

    def _merged(self) -> dict[str, ModelSpec]:
        found: dict[str, ModelSpec] = {}
        for root in self._roots:
            specs = self._found.get(root, {})
            for name in sorted(specs.keys() & found.keys()):
                self._tell(root, name, "an earlier root has a model of that name.")
            found = specs | found
        merged = self._fixed | {name: found[name] for name in sorted(found.keys() - self._fixed.keys())}
        adapters = [(root, spec) for root in self._roots for spec in self._found.get(root, {}).values() if spec.base]
        return self._seated(merged, [(root, spec) for root, spec in adapters if merged[spec.name] is spec])

    def _seated(
        self, specs: Mapping[str, ModelSpec], adapters: Sequence[tuple[str, ModelSpec]]
    ) -> dict[str, ModelSpec]:
        """Assigns the adapters found under each root to their bases; drops those without one."""
        seated = dict(specs)
        near = {root: self._near(root, specs) for root in {root for root, _ in adapters}}
        by_base: dict[str, list[ModelSpec]] = defaultdict(list)
        for root, adapter in adapters:
            try:
                by_base[_base_of(adapter, near[root])].append(adapter)
            except UnknownModel as error:
                self._tell(root, adapter.name, error.message)
                del seated[adapter.name]
        for name, own in by_base.items():
            base = specs[name]
            places = ((adapter.name, adapter.config.model or "") for adapter in own)
            config = replace(base.config, adapters=(*base.config.adapters, *places))
            pinned = base.pinned or any(adapter.pinned for adapter in own)
            seated[name] = replace(base, config=config, pinned=pinned)
            seated |= {adapter.name: replace(adapter, config=config, base=name) for adapter in own}
        return seated

    def _near(self, root: str, specs: Mapping[str, ModelSpec]) -> set[str]:
        """Possible bases for adapters under a root: models of the same root, and those named at startup."""
        near = self._found[root] | self._fixed
        return {name for name, spec in near.items() if spec.base is None and specs[name] is spec}

    def _tell(self, root: str, name: str, why: str) -> None:
        """Warns once."""
        if (root, name, why) not in self._told:
            self._told.add((root, name, why))
            _log.warning("%s under %s is not served: %s", name, root, why)

    def _choice(self, name: str) -> str:
        if not self._specs:
            return "No models are known here. Check --model and --models."
        # Comparing is slow, and there may be thousands.
        place = bisect(self._names, name)
        names = self._names[max(0, place - _NEIGHBOURS) : place + _NEIGHBOURS]
        near = difflib.get_close_matches(name[:_MOST_SHOWN], names, n=_MOST_NAMED, cutoff=0.0)
        more = len(self._names) - len(near)
        return f"Ask for one of these: {', '.join(near)}{f' (or one of {more} others)' if more else ''}."


def _base_of(adapter: ModelSpec, known: Collection[str]) -> str:
    assert adapter.base is not None
    base = resolve_base(adapter.base, known)
    if base is None:
        raise UnknownModel(
            f"it is an adapter of {adapter.base[:_MOST_SHOWN]!r}, but there is no such model next to it or named at "
            "startup. Add that, or name another in a file base_model in its directory."
        )
    return base


def _listing_error(root: str, error: BaseException) -> OstroError:
    _log.warning("%s cannot be listed: %s", root, error)
    if isinstance(error, OstroError):
        return error
    return DownloadFailed(
        f"One of the roots that hold models cannot be listed ({type(error).__name__}), so it is not known whether "
        "there is such a model. Try again later."
    )


def resolve(name: str, known: Collection[str]) -> str | None:
    """The known name that is meant: itself, or the one that differs only by "/" for "-"; None if there is none.

    Raises UnknownModel if it is ambiguous.
    """
    if name in known:
        return name
    if not is_name(name):
        return None
    matches = [other for other in _spellings(name) if other in known]
    if len(matches) > 1:
        raise UnknownModel(f"{name!r} could be {' or '.join(map(repr, matches))}. Ask for one of them by its own name.")
    return matches[0] if matches else None


def resolve_base(asked: str, known: Collection[str]) -> str | None:
    """The known model that an adapter's base refers to: a name, or an address that ends in one."""
    parts = asked.strip("/").split("/")
    return resolve(asked, known) or resolve("/".join(parts[-2:]), known) or resolve(parts[-1], known)


def _spellings(name: str) -> list[str]:
    if "/" in name:
        return [name.replace("/", "-")]
    return [f"{name[:at]}/{name[at + 1 :]}" for at, letter in enumerate(name) if letter == "-"]
