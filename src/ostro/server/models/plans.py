"""What `ostro plan` says about a model that the server could load, and how large its files are. Loads nothing, and
downloads no weights; knows no HTTP and no pool.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from ostro.config import EngineConfig
from ostro.devices import device_kind_here
from ostro.errors import OstroError, Unavailable
from ostro.frontend.requests import sampling_defaults
from ostro.sampling_defaults import SamplingDefaults
from ostro.sources.aliases import Alias
from ostro.sources.hub import HubModel
from ostro.sources.model_reference import ModelReference, RemoteFiles
from ostro.sources.pypi import WheelModel
from ostro.sources.references import StoredModel, parse_model
from ostro.weights import open_checkpoint, open_remote_headers

if TYPE_CHECKING:
    from ostro.backends.planning import Plan

SourceKind = Literal["path", "bucket", "hub", "wheels", "short name"]

_PATIENCE_SECONDS = 30.0
_GLANCE_SECONDS = 1.0
_UNREAD = "Its headers cannot be read where it comes from, so its plan is known once it is on this machine."

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What is known of a model before it is loaded."""

    kind: SourceKind
    source: str
    is_here: bool
    """Whether all its files are on this machine."""
    num_bytes: int | None
    """Size of its files; None if that is not known before they are downloaded."""
    plan: "Plan | None"
    unknown: str | None
    """Why there is no plan."""


def planned(path: str, config: EngineConfig, *, freed: int = 0) -> "Plan":
    """The plan for this machine. Counts all of a GPU's memory, since loaded models are unloaded if necessary, and on
    other devices `freed` bytes besides what is free.
    """
    from ostro.backends.planning import plan

    kind = device_kind_here(config.device, config.backend)
    return plan(path, config, device=kind.name, memory=_memory(config, freed))


class Planner:
    """Makes plans one at a time, in threads that nobody waits for: a place with the files may not answer for minutes,
    and a process waits for its other threads when it exits. Use within one event loop.
    """

    def __init__(self, general: EngineConfig, patience_seconds: float = _PATIENCE_SECONDS) -> None:
        """`general` are the settings of models that have none of their own."""
        self.general = general
        self._patience_seconds = patience_seconds
        self._busy: asyncio.Future[None] | None = None

    async def outlook(self, config: EngineConfig, *, freed: int = 0) -> Outlook:
        """Raises Unavailable if the files, or the plans before it, take too long."""
        return await self._in_thread(lambda: _outlook(config, freed))

    async def recommended(self, config: EngineConfig) -> SamplingDefaults | None:
        """The sampling that the model's files recommend; None if they are not on this machine, cannot be read, or take
        longer than a list of models may.
        """
        try:
            return await self._in_thread(lambda: _recommended(config), _GLANCE_SECONDS)
        except (OstroError, OSError):
            return None

    async def _in_thread(self, work: Callable[[], T], patience_seconds: float | None = None) -> T:
        patience_seconds = self._patience_seconds if patience_seconds is None else patience_seconds
        try:
            async with asyncio.timeout(patience_seconds):
                while self._busy is not None:
                    await asyncio.wait([self._busy])
                return await asyncio.shield(self._begin(work))
        except TimeoutError:
            raise Unavailable(
                f"The model's files did not answer within {patience_seconds:g} s. Try again later.",
                retry_after=round(patience_seconds),
            ) from None

    def _begin(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = loop.create_future()
        busy = self._busy = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            self._busy = None
            busy.set_result(None)
            if error is None:
                outcome.set_result(result)  # type: ignore[arg-type]
            else:
                outcome.set_exception(error)
                # Nobody may be waiting any more.
                outcome.exception()

        def run() -> None:
            result, raised = None, None
            try:
                result = work()
            except Exception as error:  # noqa: BLE001
                raised = error
            # The loop may have ended meanwhile.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, result, raised)

        threading.Thread(target=run, name="plan", daemon=True).start()
        return outcome


def recommended_sampling(path: Path, config: EngineConfig) -> SamplingDefaults:
    return sampling_defaults(open_checkpoint(path, model_config=config.model_config), config)


def _recommended(config: EngineConfig) -> SamplingDefaults | None:
    path = parse_model(config.model).find(newest=False)
    return None if path is None else recommended_sampling(path, config)


def _outlook(config: EngineConfig, freed: int) -> Outlook:
    reference = parse_model(config.model)
    path = reference.find(newest=False)
    sizes = None
    plan: Plan | None = None
    unknown: str | None = None
    try:
        if path is not None:
            sizes = _size_on_disk(path)
            plan = planned(str(path), config, freed=freed)
        elif (files := reference.remote_files()) is None:
            unknown = _UNREAD
        else:
            sizes = sum(files.sizes.values())
            plan = _planned_elsewhere(files, config, freed)
    except OstroError as error:
        unknown = error.message
    except OSError as error:
        # A file that was removed meanwhile, say.
        unknown = f"Its files cannot be read: {error.strerror or error}."
    return Outlook(
        kind=_kind(reference),
        source=str(config.model or reference),
        is_here=path is not None,
        num_bytes=_announced(reference) if sizes is None else sizes,
        plan=plan,
        unknown=unknown,
    )


def _planned_elsewhere(files: RemoteFiles, config: EngineConfig, freed: int) -> "Plan":
    """From the headers at the source."""
    from ostro.backends.planning import plan

    kind = device_kind_here(config.device, config.backend)
    with open_remote_headers(files, str(config.model), model_config=config.model_config) as headers:
        return plan(headers, config, device=kind.name, memory=_memory(config, freed))


def _memory(config: EngineConfig, freed: int) -> int | None:
    kind = device_kind_here(config.device, config.backend)
    own = kind.memory(config.tensor_parallel) if kind.has_own_memory or freed else None
    if own is None:
        return None
    return own.total if kind.has_own_memory else own.free + freed


def _size_on_disk(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(
        os.stat(os.path.join(directory, name)).st_size
        for directory, _, names in os.walk(path)
        for name in names
        if os.path.exists(os.path.join(directory, name))
    )


def _announced(reference: ModelReference) -> int | None:
    return reference.num_bytes if isinstance(reference, Alias | WheelModel) else None


def _kind(reference: ModelReference) -> SourceKind:
    match reference:
        case Alias():
            return "short name"
        case StoredModel():
            return "bucket"
        case HubModel():
            return "hub"
        case WheelModel():
            return "wheels"
        case _:
            return "path"
