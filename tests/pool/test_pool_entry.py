"""The states of one model, and who may change them."""

import ast
import asyncio
from pathlib import Path

import pytest
from pool_world import FakeService, Model, World, a_spec

from ostro import pool
from ostro.errors import ModelError
from ostro.pool.budget import PoolLimits
from ostro.pool.entry import Entry, PoolState


def test_only_an_entry_changes_its_state() -> None:
    [directory] = pool.__path__
    changed = {
        path.name
        for path in Path(directory).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "state" and isinstance(node.ctx, ast.Store)
    }
    assert changed == {"entry.py"}


def an_entry() -> tuple[Entry[FakeService], FakeService]:
    spec = a_spec("a")
    return Entry(spec), FakeService(World({"a": Model()}, PoolLimits()), spec)


def test_a_model_goes_from_available_to_ready_and_back() -> None:
    async def scenario() -> None:
        entry, service = an_entry()
        entry.begin_load(now=1.0)
        entry.load(service)
        assert (entry.state, entry.resident, entry.gone.is_set()) == (PoolState.LOADING, True, False)
        assert entry.loaded(now=3.0)
        assert (entry.load_seconds, entry.num_loads) == (2.0, 1)
        entry.open()
        assert entry.state is PoolState.READY
        entry.reload(now=4.0)
        assert not entry.loaded(now=5.0), "an engine that starts again is no new load"
        entry.ask_to_go()
        assert (entry.state, entry.leaving) == (PoolState.DRAINING, True)
        entry.end()
        assert (entry.state, entry.resident, entry.gone.is_set()) == (PoolState.AVAILABLE, False, True)

    asyncio.run(scenario())


@pytest.mark.parametrize(("forgive", "failures"), [(False, 1), (True, 0)])
def test_a_model_that_failed_stays_so_until_it_is_revived(forgive: bool, failures: int) -> None:
    async def scenario() -> None:
        entry, service = an_entry()
        entry.load(service)
        entry.fail(ModelError("No."), now=1.0, pause=30.0)
        assert (entry.state, entry.retry_at, entry.leaving) == (PoolState.FAILED, 31.0, True)
        entry.end()
        assert entry.state is PoolState.FAILED
        entry.revive(forgive=forgive)
        assert (entry.state, entry.failure, entry.num_failures) == (PoolState.AVAILABLE, None, failures)

    asyncio.run(scenario())
