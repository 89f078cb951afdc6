"""Builds a native runner from a checkpoint: finds the model's packed weights or packs them. Imports no torch."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import BinaryIO, Protocol, TypeVar

from ostro.backends.backend import OpenedModel, Unloadable
from ostro.backends.native.encoder import NativeEncoderRunner
from ostro.backends.native.lora import NativeAdapters
from ostro.backends.native.packed_cache import PackedKey, packed_key, with_packed_weights
from ostro.backends.native.packing import Packable, pack
from ostro.backends.native.runner import NativeRunner
from ostro.backends.native.support import NotNative, WrongPanel, check_native
from ostro.config import HugePages
from ostro.kernels.cpu.library import BITS, instruction_sets, panel_of
from ostro.kernels.cpu.packed_file import PackedFile, PackedWriter
from ostro.kernels.cpu.program import Allocate, Program
from ostro.models.architecture import Architecture
from ostro.models.encoder import Encoder
from ostro.models.expert_layers import ExpertLayers
from ostro.system.machine import free_memory
from ostro.system.topology import ThreadChoice, kept_to, threads_here
from ostro.weights.adapter import read_adapter

RunnerT = TypeVar("RunnerT")
RunnerT_co = TypeVar("RunnerT_co", covariant=True)

_log = logging.getLogger(__name__)


def decoder_runner(opened: OpenedModel, described: Architecture) -> NativeRunner:
    """Raises Unloadable if the weights cannot be packed."""
    # Read before the weights are packed, so that adapters that do not fit fail at once.
    found = {name: read_adapter(path) for name, path in opened.config.adapters}
    adapters = NativeAdapters(described, found) if found else None

    def make(packed: PackedFile, *, isa: str, threads: int) -> NativeRunner:
        pooling = opened.checkpoint.pooling
        return NativeRunner.sized(packed, opened.resolved, isa=isa, threads=threads, pooling=pooling, adapters=adapters)

    return _runner(opened, described, make)


def encoder_runner(opened: OpenedModel, described: Encoder) -> NativeEncoderRunner:
    """Raises Unloadable if the weights cannot be packed."""

    def make(packed: PackedFile, *, isa: str, threads: int) -> NativeEncoderRunner:
        return NativeEncoderRunner(
            packed,
            described,
            opened.checkpoint.pooling,
            isa=isa,
            max_batch_tokens=opened.kind.encoded_tokens(opened.config),
            max_batch_seqs=opened.resolved.max_batch_seqs,
            threads=threads,
        )

    return _runner(opened, described, make)


def expert_program(
    opened: OpenedModel, layers: ExpertLayers, *, max_rows: int, threads: ThreadChoice, allocate: Mapping[int, Allocate]
) -> Program:
    """A program for experts of a model on a GPU. Raises Unloadable like the others."""

    def make(packed: PackedFile, *, isa: str, threads: int) -> Program:
        return Program(
            packed, isa=isa, num_pages=0, max_tokens=max_rows, max_asked=1, threads=threads, allocate=allocate
        )

    return _runner(opened, layers, make, threads)


class _Make(Protocol[RunnerT_co]):
    def __call__(self, packed: PackedFile, /, *, isa: str, threads: int) -> RunnerT_co: ...


def _runner(
    opened: OpenedModel, described: Packable, make: "_Make[RunnerT]", threads: ThreadChoice | None = None
) -> RunnerT:
    choice = threads or threads_here(opened.config.threads)
    _log.info("threads: %s", choice.reason)
    if choice.warning is not None:
        _log.warning("%s", choice.warning)
    with kept_to(choice.cpus):
        return _runner_on(choice.number, opened, described, make)


def _runner_on(threads: int, opened: OpenedModel, described: Packable, make: "_Make[RunnerT]") -> RunnerT:
    part = described.label if isinstance(described, ExpertLayers) else None
    for isa in instruction_sets():
        panel = panel_of(isa)
        key = packed_key(opened.checkpoint, opened.config, panel, part)

        def write(file: BinaryIO, make_room: Callable[[int], None], key: PackedKey = key, panel: int = panel) -> None:
            _pack(opened, described, PackedWriter(file, panel, key=key.digest, threads=threads), make_room)

        def use(packed: PackedFile, isa: str = isa) -> RunnerT:
            _place(packed, opened.config.huge_pages, threads)
            return make(packed, isa=isa, threads=threads)

        try:
            return with_packed_weights(key, write, use)
        except WrongPanel:
            continue
        except NotNative as error:
            raise Unloadable(str(error)) from error
        except OSError as error:
            raise Unloadable(f"its packed weights cannot be written ({error.strerror or error})") from error
    raise Unloadable("no instruction set of this machine can run it")


def _place(packed: PackedFile, wanted: HugePages, threads: int) -> None:
    """Moves the weights into huge pages if that is wanted."""
    if wanted == "off":
        return
    free = free_memory()
    packed.take_huge_pages(free if wanted == "always" else free // 2, threads)
    place = "a copy" if packed.is_copied else "the mapped file"
    _log.info("weights: %d of %d MiB in huge pages, in %s", packed.huge_bytes >> 20, packed.nbytes >> 20, place)


def _pack(opened: OpenedModel, described: Packable, writer: PackedWriter, make_room: Callable[[int], None]) -> None:
    check_native(described, writer.panel)
    arrays = opened.checkpoint.arrays()
    if isinstance(described, ExpertLayers):
        arrays = (each for each in arrays if each[0] in described.names)
    started = time.monotonic()
    _log.info("packing the weights, once")
    program = pack(described, arrays, writer, bits=BITS[opened.config.quantize], make_room=make_room)
    writer.finish(program.to_json())
    _log.info("packed in %.1f s", time.monotonic() - started)
