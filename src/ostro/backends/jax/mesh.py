"""Which devices run a model. Knows no weights and no programs."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from ostro.errors import BadRequest, Unsupported
from ostro.models.cut import divisible, most_ranks, possible_ranks
from ostro.models.description import Description

AXIS = "model"
"""The mesh axis over which heads, inner widths and the vocabulary are divided."""


def make_mesh(ranks: int, platform: str | None = None) -> Mesh:
    """A mesh of the first `ranks` devices of a platform ("cpu", "cuda", "tpu"); None is JAX's default platform."""
    devices = _devices(platform)
    if len(devices) < ranks:
        # Virtual CPU devices are counted once in a process: see `backends.jax.load`.
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


def fitting_ranks(described: Description, platform: str) -> int:
    """How many devices "auto" divides a model over: as many as possible, but one on a CPU, where more gain nothing. A
    mesh of several processes needs all of their devices.
    """
    number = len(_devices(platform))
    if jax.process_count() > 1:
        return number
    return 1 if platform == "cpu" else most_ranks(described, number)


def check_whole_mesh(described: Description, devices: int) -> None:
    """Raises BadRequest if the model cannot be divided over all devices of several processes, each of which has to take
    part whatever `tensor_parallel` is.
    """
    possible = possible_ranks(divisible(described))
    if devices not in possible:
        raise BadRequest(
            f"The hosts of the mesh have {devices} devices, all of which are needed, but the model can be divided only "
            f"over {', '.join(map(str, possible))}. Use more or fewer hosts, or other numbers of devices on them.",
            param="tensor_parallel",
        )


def count_devices(platform: str | None) -> int:
    """The number of devices of all processes."""
    return len(_devices(platform))


def _devices(platform: str | None) -> list[jax.Device]:
    try:
        return jax.devices(platform)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise Unsupported(
            f"JAX finds no {platform} device ({reason}). Install JAX for it, or choose another device."
        ) from error


def is_over_processes(mesh: Mesh) -> bool:
    """Whether other processes own some of its devices."""
    return any(device.process_index != jax.process_index() for device in mesh.devices.flat)
