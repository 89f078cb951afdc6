"""An API process that is killed takes everything it started with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from live_service import set_faults

# Serves until it is killed; says so once it is at work.
_SERVE = """
import asyncio
from live_service import endless, live_service

async def main():
    async with live_service() as service:
        generation = service.stream(await endless(service))
        await anext(generation)
        print(service.engine_pid, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""
# Is killed while its engine loads.
_LOAD = """
import asyncio
from ostro.config import EngineConfig
from ostro.engine_process.handle import EngineHandle

async def main():
    handle = EngineHandle(EngineConfig())
    handle.start()
    await handle.located()
    print(handle.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
# Is killed while its kernels are compiled ahead.
_PRECOMPILE = """
import time
from ostro.backends.cuda.precompiling import Precompiler

print(Precompiler().pid, flush=True)
time.sleep(60)
"""


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        # A zombie holds nothing but its number, until whoever adopted it looks.
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@pytest.mark.parametrize(
    ("program", "faults", "how"),
    [
        (_SERVE, "step_seconds=0.01", signal.SIGKILL),
        pytest.param(_SERVE, "step_seconds=0.01", signal.SIGSEGV, marks=pytest.mark.full),
        pytest.param(_SERVE, "stall_after=3", signal.SIGKILL, marks=pytest.mark.full),
        (_SERVE, "stall_after=3", signal.SIGSEGV),
        (_LOAD, "load_seconds=60", signal.SIGKILL),
        pytest.param(_LOAD, "load_seconds=60", signal.SIGSEGV, marks=pytest.mark.full),
    ],
    ids=["working", "working-segv", "stuck", "stuck-segv", "loading", "loading-segv"],
)
def test_no_engine_outlives_its_api_process(
    monkeypatch: pytest.MonkeyPatch, program: str, faults: str, how: signal.Signals
) -> None:
    set_faults(monkeypatch, faults)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as api:
        assert api.stdout is not None
        engine = int(api.stdout.readline())
        assert is_alive(engine)
        os.kill(api.pid, how)
        deadline = time.monotonic() + 60
        while is_alive(engine):
            assert time.monotonic() < deadline, "the engine is still alive after a minute"
            time.sleep(0.05)


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_nothing_is_compiled_for_a_process_that_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", _PRECOMPILE], stdout=subprocess.PIPE, text=True) as loading:
        assert loading.stdout is not None
        pid = int(loading.stdout.readline())
        loading.kill()
    while is_alive(pid):
        time.sleep(0.02)
