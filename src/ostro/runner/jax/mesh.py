"""Which devices run a model. Knows no weights and no programs."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from ostro.errors import BadRequest, Unsupported

AXIS = "model"
"""The mesh axis over which heads, inner widths and the vocabulary are divided."""


def make_mesh(ranks: int, platform: str | None = None) -> Mesh:
    """A mesh of the first `ranks` devices of a platform ("cpu", "cuda", "tpu"); None is JAX's default platform."""
    try:
        devices = jax.devices(platform)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise Unsupported(
            f"JAX finds no {platform} device ({reason}). Install JAX for it, or choose another device."
        ) from error
    if len(devices) < ranks:
        # Virtual CPU devices are counted once in a process: see `runner.jax.load`.
        cure = "Load the model that needs most devices first" if devices[0].platform == "cpu" else "Lower it"
        raise BadRequest(
            f"tensor_parallel is {ranks}, but JAX finds {len(devices)} {devices[0].platform} devices. {cure}.",
            param="tensor_parallel",
        )
    if jax.process_count() > 1 and len(devices) > ranks:
        raise BadRequest(
            f"tensor_parallel is {ranks}, but the processes of the mesh have {len(devices)} devices. Set it to their "
            "number.",
            param="tensor_parallel",
        )
    # The data axis has one entry until the engine can keep a sequence's pages in one part of the mesh.
    return Mesh(np.array(devices[:ranks]).reshape(1, ranks), ("data", AXIS), axis_types=(AxisType.Auto,) * 2)


def is_over_processes(mesh: Mesh) -> bool:
    """Whether other processes own some of its devices."""
    return any(device.process_index != jax.process_index() for device in mesh.devices.flat)
