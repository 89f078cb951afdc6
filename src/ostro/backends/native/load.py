"""Builds a native runner from a checkpoint: finds the model's packed weights or packs them. Imports no torch."""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import BinaryIO, Protocol, TypeVar

from ostro.backends.backend import OpenedModel, Unloadable
from ostro.backends.native.encoder import NativeEncoderRunner
from ostro.backends.native.lora import NativeAdapters
from ostro.backends.native.packed_cache import PackedKey, packed_key, with_packed_weights
from ostro.backends.native.packing import pack
from ostro.backends.native.runner import NativeRunner
from ostro.backends.native.support import NotNative, WrongPanel, native_architecture
from ostro.kernels.cpu.library import BITS, instruction_sets, panel_of
from ostro.kernels.cpu.packed_file import PackedFile, PackedWriter
from ostro.models.architecture import Architecture
from ostro.models.encoder import Encoder
from ostro.system.machine import num_cpus
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


class _Make(Protocol[RunnerT_co]):
    def __call__(self, packed: PackedFile, /, *, isa: str, threads: int) -> RunnerT_co: ...


def _runner(opened: OpenedModel, described: Architecture | Encoder, make: "_Make[RunnerT]") -> RunnerT:
    threads = opened.config.threads or num_cpus()
    for isa in instruction_sets():
        panel = panel_of(isa)
        key = packed_key(opened.checkpoint, opened.config, panel)

        def write(file: BinaryIO, make_room: Callable[[int], None], key: PackedKey = key, panel: int = panel) -> None:
            _pack(opened, described, PackedWriter(file, panel, key=key.digest, threads=threads), make_room)

        try:
            return with_packed_weights(key, write, partial(make, isa=isa, threads=threads))
        except WrongPanel:
            continue
        except NotNative as error:
            raise Unloadable(str(error)) from error
        except OSError as error:
            raise Unloadable(f"its packed weights cannot be written ({error.strerror or error})") from error
    raise Unloadable("no instruction set of this machine can run it")


def _pack(
    opened: OpenedModel, described: Architecture | Encoder, writer: PackedWriter, make_room: Callable[[int], None]
) -> None:
    native_architecture(described, writer.panel)
    started = time.monotonic()
    _log.info("packing the weights, once")
    program = pack(described, opened.checkpoint, writer, bits=BITS[opened.config.quantize], make_room=make_room)
    writer.finish(program.to_json())
    _log.info("packed in %.1f s", time.monotonic() - started)
