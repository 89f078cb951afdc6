"""JAX runners on tiny models, on eight virtual devices. Import it before anything else asks JAX for its devices.

Compiling takes most of the time of these tests: programs are optimised little, and those that several models share are
compiled once per process.
"""

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import pytest
from every_family import DIVISIBLE
from jax import monitoring
from native_models import ModelCheckpoint
from numpy.typing import DTypeLike

from ostro.backends.jax.adapters import Adapters
from ostro.backends.jax.placed import PlacedModel
from ostro.backends.jax.runner import JaxRunner
from ostro.backends.jax.shapes import Sizes
from ostro.models.registry import describe
from ostro.torch_models.base import Model
from ostro.weights import Checkpoint, Pooling

os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 " + os.environ.get("XLA_FLAGS", "")
_compiled = tempfile.mkdtemp()
atexit.register(shutil.rmtree, _compiled, ignore_errors=True)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", _compiled)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

ROWS = 8
DEGREES = (1, 2, 4, 8)
EVERY_DEGREE = [
    *(pytest.param(1, marks=pytest.mark.full), pytest.param(8)),
    *(pytest.param(tp, marks=pytest.mark.slow) for tp in (2, 4)),
]
"""For tests that compile a program for each."""


FAMILIES = DIVISIBLE


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Lists the programs that JAX makes within the block, read from disk or compiled."""
    found: list[str] = []

    def listen(event: str, duration: float, **context: object) -> None:
        if event.endswith("backend_compile_duration"):
            found.append(str(context.get("fun_name")))

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        monitoring.unregister_event_duration_listener(listen)


def jax_runner(config: Mapping[str, object], model: Model, **options: Any) -> JaxRunner:
    """A runner with the weights of a torch model; `options` are those of `jax_runner_of`."""
    return jax_runner_of(ModelCheckpoint(model, config), **options)


def jax_runner_of(
    checkpoint: Checkpoint,
    *,
    tp: int = 1,
    pages: int = 128,
    states: int = 16,
    budget: int = 64,
    rows: int = ROWS,
    dtype: DTypeLike = np.float32,
    pooling: Pooling | None = None,
    steps_ahead: int = 1,
    adapters: Adapters | None = None,
) -> JaxRunner:
    placed = PlacedModel.load(
        describe(checkpoint.config), checkpoint, tensor_parallel=tp, dtype=dtype, adapters=adapters
    )
    num_states = states if placed.described.states else 0
    return JaxRunner(
        placed,
        Sizes(page_size=4, num_pages=pages, max_batch_tokens=budget, max_batch_seqs=rows, num_states=num_states),
        pooling=pooling,
        steps_ahead=steps_ahead,
    )
