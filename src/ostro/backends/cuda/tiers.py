"""Tiers below a GPU's pages: host memory, and a disk that is reached through it."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import NamedTuple

from ostro.backends.cuda.host_disk_store import HostDiskStore
from ostro.backends.cuda.host_store import HostStore
from ostro.backends.tiers.disk_store import TRIAL_PAGES, TrialStores, trial_disk
from ostro.backends.tiers.page_disk import PageDisk
from ostro.backends.tiers.page_file import Bytes
from ostro.config import EngineConfig
from ostro.engine.page_store import PageStore
from ostro.errors import BadRequest, ModelError, Unsupported
from ostro.system.machine import free_memory

# Host memory for pages on their way to disk, and as much for those on their way back.
_PASSING_BYTES = 256 << 20
_FEWEST_PASSING = 4

# The share of host memory that is for recurrent states, where the model keeps such: as of the device's.
_FOR_STATES = 1 / 4

MakeHostStore = Callable[[int, int], HostStore]
"""Makes one with so many slots for pages, and so many for states."""


class HostRoom(NamedTuple):
    slots: int
    state_slots: int


def host_room(num_bytes: int, page_bytes: int, state_bytes: int) -> HostRoom:
    """How many evicted pages and states host memory of this size holds."""
    num_states = int(num_bytes * _FOR_STATES) // state_bytes if state_bytes else 0
    return HostRoom((num_bytes - num_states * state_bytes) // page_bytes, num_states)


def check_disk(config: EngineConfig, state_bytes: int) -> None:
    """Raises Unsupported if the model keeps states, which do not get to disk, and a disk is asked for."""
    setting = next((each for each in config.tier_settings if each != "kv_host_memory"), None)
    if state_bytes and setting is not None:
        raise Unsupported(
            f"{setting} does not work on a GPU with models whose layers keep recurrent states: the disk below it holds "
            "pages only. Leave it out; kv_host_memory keeps states too.",
            param=setting,
        )


def check_host_memory(config: EngineConfig, page_bytes: int, state_bytes: int = 0) -> None:
    """Raises BadRequest if the host memory, which is taken at once and pinned, is more than is free or less than a page
    takes; or a recurrent state, for a model that keeps such.
    """
    asked = config.kv_host_memory
    if asked is None:
        return
    if asked > (free := free_memory()):
        raise BadRequest(
            f"kv_host_memory is {asked / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of this machine's memory are free. "
            "Lower it.",
            param="kv_host_memory",
        )
    if asked < page_bytes:
        raise BadRequest(
            f"kv_host_memory has no room for a page, which takes {page_bytes} bytes. Raise it.", param="kv_host_memory"
        )
    if state_bytes and not host_room(asked, page_bytes, state_bytes).state_slots:
        least = int(state_bytes / _FOR_STATES)
        raise BadRequest(
            "kv_host_memory has no room for a recurrent state, without which pages are of no use: give it at least "
            f"{least} bytes.",
            param="kv_host_memory",
        )


def page_store(
    host_store: MakeHostStore, config: EngineConfig, disk: PageDisk | None, page_bytes: int, state_bytes: int = 0
) -> PageStore | None:
    """Pages move to and from disk through host memory, which needs some extra memory for that."""
    room = host_room(config.kv_host_memory or 0, page_bytes, state_bytes)
    num_slots = room.slots
    if disk is None:
        return pinned_store(host_store, config, room) if num_slots else None
    passing = _passing(page_bytes)
    return HostDiskStore(
        pinned_store(host_store, config, HostRoom(num_slots + 2 * passing, 0)),
        disk,
        num_slots=num_slots,
        num_incoming=passing,
        outlives=config.kv_persist,
    )


@contextmanager
def trial_stores(host_store: MakeHostStore, page_bytes: int) -> Iterator[TrialStores]:
    host = host_store(TRIAL_PAGES, 0)
    with closing(host), trial_disk(_Slots(host), page_bytes) as (store, _):
        yield TrialStores(page_bytes, host, host.most_staged, store, _passing(page_bytes))


class _Slots:
    """Host memory below a GPU, in units of a disk's pages."""

    def __init__(self, host: HostStore) -> None:
        self._host = host

    def page(self, number: int) -> Bytes:
        return self._host.slot(number)


def _passing(page_bytes: int) -> int:
    return max(_FEWEST_PASSING, _PASSING_BYTES // page_bytes)


def pinned_store(host_store: MakeHostStore, config: EngineConfig, room: HostRoom) -> HostStore:
    """Raises ModelError if there is not enough memory to pin."""
    try:
        return host_store(*room)
    except MemoryError as error:
        disk = config.tier_settings[0]
        advice = f"Free some, or leave {disk} out" if config.kv_host_memory is None else "Lower kv_host_memory"
        raise ModelError(f"{error}. {advice}.") from error
