"""JAX runners on tiny models. Import it before anything else uses JAX: it decides how many devices there are."""

from collections.abc import Mapping

import jax
import numpy as np
from native_models import ModelCheckpoint
from numpy.typing import DTypeLike

from ostro.models.registry import describe
from ostro.runner.jax.runner import JaxRunner, Sizes
from ostro.torch_models.base import Model
from ostro.weights import Pooling

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

ROWS = 8


def jax_runner(
    config: Mapping[str, object],
    model: Model,
    *,
    tp: int = 1,
    pages: int = 128,
    budget: int = 64,
    rows: int = ROWS,
    dtype: DTypeLike = np.float32,
    pooling: Pooling | None = None,
    steps_ahead: int = 1,
) -> JaxRunner:
    """A runner with the weights of a torch model."""
    return JaxRunner(
        describe(config),
        ModelCheckpoint(model, config),
        Sizes(page_size=4, num_pages=pages, max_batch_tokens=budget, max_batch_seqs=rows),
        tensor_parallel=tp,
        dtype=dtype,
        pooling=pooling,
        steps_ahead=steps_ahead,
    )
