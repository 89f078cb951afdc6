"""JAX's profiler: its dispatch on the host, and what runs on the devices. Knows no schedule."""

import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory

import jax

from ostro.engine.profile import Profiler


class JaxProfiler(Profiler):
    def __init__(self) -> None:
        self._directory = TemporaryDirectory(prefix="ostro-profile-")
        options = jax.profiler.ProfileOptions()
        # Every call of a Python function would be an event, and take longer.
        options.python_tracer_level = 0
        jax.profiler.start_trace(self._directory.name, create_perfetto_trace=True, profiler_options=options)

    def span(self, name: str, **counts: int) -> AbstractContextManager[object]:
        return jax.profiler.TraceAnnotation(name, **counts)

    def write(self, path: Path) -> None:
        with self._directory as directory:
            jax.profiler.stop_trace()
            [trace] = Path(directory).glob("plugins/profile/*/perfetto_trace.json.gz")
            shutil.move(trace, path)
