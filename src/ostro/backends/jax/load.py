"""Builds a JAX runner from a checkpoint: prepares JAX, places the weights, sizes the KV cache. Imports no torch."""

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ostro.backends.backend import OpenedModel
from ostro.backends.jax.adapters import Adapters
from ostro.backends.jax.compiling import Compiler
from ostro.backends.jax.hosts import agree, disconnect, join_hosts, least
from ostro.backends.jax.kept_programs import software
from ostro.backends.jax.mesh import check_whole_mesh, count_devices, fitting_ranks, is_over_processes
from ostro.backends.jax.placed import PlacedModel
from ostro.backends.jax.programs import Programs
from ostro.backends.jax.runner import JaxRunner
from ostro.backends.jax.shapes import Sizes
from ostro.backends.memory import Room, StateSlots, device_room, host_room, rank_shape
from ostro.config import ResolvedConfig
from ostro.devices import DEVICE_KINDS
from ostro.errors import BadRequest, ModelError
from ostro.models.architecture import state_bytes
from ostro.models.description import Description
from ostro.system.mesh_hosts import mesh_hosts
from ostro.weights import Checkpoint
from ostro.weights.adapter import read_adapter

_DTYPES: dict[str, npt.DTypeLike] = {"float32": np.float32, "float16": np.float16, "bfloat16": jnp.bfloat16}
# Pages and states in the program that measures a step's memory, which does not depend on their number.
_TRIAL_PAGES = 8
# Weight files are recognised by this many samples of this size.
_NUM_SAMPLES, _SAMPLE_BYTES = 256, 4096

_log = logging.getLogger(__name__)


def jax_runner(opened: OpenedModel, *, following: Callable[[], None] = lambda: None) -> JaxRunner:
    """If `tensor_parallel` is "auto", the model is divided over as many devices as possible.

    Of several processes that share a mesh, only the first gets a runner. The others call `following` once they follow
    it, and end when it does.
    """
    checkpoint, described, config = opened.checkpoint, opened.description, opened.resolved
    _prepare(config)
    if opened.config.tensor_parallel == "auto":
        config = replace(config, tensor_parallel=fitting_ranks(described, config.device))
        _log.info(
            "tensor_parallel is auto: the model runs on %d of %d %s devices",
            config.tensor_parallel,
            jax.device_count(),
            config.device,
        )
    adapters = {name: read_adapter(path) for name, path in config.adapters}
    if jax.distributed.is_initialized():
        agree("settings", _facts(checkpoint, config, described, adapters))
    if jax.process_count() > 1:
        try:
            check_whole_mesh(described, count_devices(config.device))
        except BadRequest:
            disconnect()
            raise
    placed = PlacedModel.load(
        described,
        checkpoint,
        tensor_parallel=config.tensor_parallel,
        platform=config.device,
        dtype=_DTYPES[DEVICE_KINDS[config.device].compute_dtype(config.dtype)],
        adapters=adapters,
    )
    if placed.platform == "cpu":
        _log.info("JAX runs the model on the CPU, which is meant for tests: the native core is much faster")
    sizes = Sizes(
        page_size=config.page_size,
        num_pages=_TRIAL_PAGES,
        max_batch_tokens=config.max_batch_tokens,
        max_batch_seqs=config.max_batch_seqs,
        num_states=_TRIAL_PAGES if placed.described.states else 0,
    )
    room = _cpu_room(placed, config) if placed.platform == "cpu" else _device_room(placed, sizes, config)
    alone = not is_over_processes(placed.mesh)
    sizes = replace(sizes, num_pages=least(room.pages), num_states=least(room.states))
    runner = JaxRunner(placed, sizes, pooling=checkpoint.pooling, keeps_programs=alone)
    if jax.process_index():
        _log.info("loaded; the first process of the mesh takes the requests, and this one follows it")
        runner.follow(following)
        _log.info("the first process of the mesh has ended")
        raise SystemExit(0)
    return runner


def _facts(
    checkpoint: Checkpoint, config: ResolvedConfig, described: Description, adapters: Adapters
) -> dict[str, str]:
    """What all processes of a mesh must have in common."""
    equal = ("tensor_parallel", "device", "page_size", "max_batch_tokens", "max_batch_seqs")
    return {
        **software(),
        **{name: str(getattr(config, name)) for name in equal},
        "dtype": DEVICE_KINDS[config.device].compute_dtype(config.dtype),
        "adapters": ", ".join(adapters),
        "the adapters' weights": adapters_digest(adapters),
        "the model's description": repr(described),
        "weights": weights_digest(checkpoint.files),
    }


def weights_digest(files: Sequence[Path]) -> str:
    """Recognises files by their sizes and by samples of their contents: reading all of them would take minutes."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for offset in _sampled_offsets(size, max(1, _NUM_SAMPLES // len(files))):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def adapters_digest(adapters: Adapters) -> str:
    digest = hashlib.sha256()
    for name, terms in adapters.items():
        for target, term in sorted(terms.items()):
            digest.update(repr((name, target, term.scale, term.a.shape, term.b.shape)).encode())
            digest.update(term.a.tobytes())
            digest.update(term.b.tobytes())
    return digest.hexdigest()


def _sampled_offsets(size: int, count: int) -> Iterator[int]:
    """Offsets spread evenly from the first possible to the last."""
    last = max(0, size - _SAMPLE_BYTES)
    yield from sorted({last * number // max(1, count - 1) for number in range(count)})


def _prepare(config: ResolvedConfig) -> None:
    """Tells JAX which devices it may use, and how much of their memory. Has no effect once JAX has looked for devices,
    as in a program that also uses it for other things.
    """
    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu" if config.device == "cpu" else f"{config.device},cpu")
    hosts = mesh_hosts()
    num_processes = 1 if hosts is None else hosts.count or 1
    if config.device == "cpu" and config.tensor_parallel > 1:
        with suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", max(1, config.tensor_parallel // num_processes))
    if config.device == "cuda" and "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", str(config.gpu_memory_utilization))
        if config.kv_memory is not None or config.kv_memory_limit is not None:
            # Other engines share the GPU.
            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    join_hosts()


def _cpu_room(placed: PlacedModel, config: ResolvedConfig) -> Room:
    """Pages and states on a CPU, where all ranks share the machine's memory."""
    return host_room(
        rank_shape(placed.described.shape, placed.cut.kv_heads * placed.cut.ranks),
        page_size=config.page_size,
        itemsize=np.dtype(placed.dtype).itemsize,
        kv_memory=config.kv_memory,
        max_batch_seqs=config.max_batch_seqs,
        limit=config.kv_memory_limit,
        max_tokens=config.max_running_tokens,
        coarse=True,
        state_bytes=placed.cut.ranks * _state_bytes(placed),
    )


def _state_bytes(placed: PlacedModel) -> int:
    """What a rank keeps of a sequence."""
    return state_bytes(placed.cut.states(placed.described), np.dtype(placed.dtype).itemsize)


def _device_room(placed: PlacedModel, sizes: Sizes, config: ResolvedConfig) -> Room:
    """What fits beside the weights and the largest step, whose programs are compiled to measure them."""
    compiler = Compiler(placed, sizes)
    trial = Programs(placed.mesh, None if is_over_processes(placed.mesh) else compiler.kept())
    trial.add(*compiler.largest())
    total, free = _memory(placed)
    return device_room(
        rank_shape(placed.described.shape, placed.cut.kv_heads, compiler.head_dim),
        page_size=config.page_size,
        itemsize=np.dtype(placed.dtype).itemsize,
        free=free,
        total=total,
        step=trial.step_bytes(),
        kv_memory=config.kv_memory,
        # On a GPU, JAX was limited to that share from the start.
        utilization=1.0 if placed.platform == "cuda" else config.gpu_memory_utilization,
        limit=config.kv_memory_limit,
        max_tokens=config.max_running_tokens,
        slots=StateSlots.of(_state_bytes(placed), config.max_batch_seqs),
    )


def _memory(placed: PlacedModel) -> tuple[int, int]:
    """Total and free bytes of the device with the least left."""
    stats = [device.memory_stats() for device in placed.mesh.local_devices]
    if not all(stats):
        raise ModelError(f"JAX does not report how much memory its {placed.platform} devices have. Set kv_memory.")
    free, total = min((each["bytes_limit"] - each["bytes_in_use"], each["bytes_limit"]) for each in stats)
    return total, free
