"""Builds a native runner from a checkpoint: finds the model's packed weights or has them made. Imports no torch."""

import logging
import time
from collections.abc import Callable
from typing import BinaryIO

from ostro.backends.backend import OpenedModel, Unloadable
from ostro.backends.native.encoder import NativeEncoderRunner
from ostro.backends.native.lora import NativeAdapters
from ostro.backends.native.packed_cache import packed_key, with_packed_weights
from ostro.backends.native.packing import pack
from ostro.backends.native.runner import NativeRunner
from ostro.backends.native.support import NotNative, WrongPanel, native_architecture
from ostro.kernels.cpu.library import BITS, instruction_sets, panel_of
from ostro.kernels.cpu.packed_file import PackedFile, PackedWriter
from ostro.models.architecture import Architecture
from ostro.models.encoder import Encoder
from ostro.system.machine import num_cpus
from ostro.weights.adapter import read_adapter

_log = logging.getLogger(__name__)


def native_runner(opened: OpenedModel) -> NativeRunner | NativeEncoderRunner:
    """Raises Unloadable if the weights cannot be packed."""
    threads = opened.config.threads or num_cpus()
    adapters = _adapters(opened)
    for isa in instruction_sets():
        try:
            return _runner(opened, isa, threads, adapters)
        except WrongPanel:
            continue
        except NotNative as error:
            raise Unloadable(str(error)) from error
        except OSError as error:
            raise Unloadable(f"its packed weights cannot be written ({error.strerror or error})") from error
    raise Unloadable("no instruction set of this machine can run it")


def _adapters(opened: OpenedModel) -> NativeAdapters | None:
    """Reads adapters before the weights are packed, so that those that do not fit fail at once."""
    config, described = opened.config, opened.description
    if not config.adapters or not isinstance(described, Architecture):
        return None
    return NativeAdapters(described, {name: read_adapter(path) for name, path in config.adapters})


def _runner(
    opened: OpenedModel, isa: str, threads: int, adapters: NativeAdapters | None
) -> NativeRunner | NativeEncoderRunner:
    panel, checkpoint, config = panel_of(isa), opened.checkpoint, opened.config
    key = packed_key(checkpoint, config, panel)

    def write(file: BinaryIO, make_room: Callable[[int], None]) -> None:
        _pack(opened, PackedWriter(file, panel, key=key.digest, threads=threads), make_room)

    def use(packed: PackedFile) -> NativeRunner | NativeEncoderRunner:
        if isinstance(opened.description, Encoder):
            return NativeEncoderRunner(
                packed,
                opened.description,
                checkpoint.pooling,
                isa=isa,
                max_batch_tokens=opened.kind.encoded_tokens(config),
                max_batch_seqs=opened.resolved.max_batch_seqs,
                threads=threads,
            )
        pooling = checkpoint.pooling
        return NativeRunner.sized(packed, opened.resolved, isa=isa, threads=threads, pooling=pooling, adapters=adapters)

    return with_packed_weights(key, write, use)


def _pack(opened: OpenedModel, writer: PackedWriter, make_room: Callable[[int], None]) -> None:
    described = native_architecture(opened.description, writer.panel)
    started = time.monotonic()
    _log.info("packing the weights, once")
    program = pack(described, opened.checkpoint, writer, bits=BITS[opened.config.quantize], make_room=make_room)
    writer.finish(program.to_json())
    _log.info("packed in %.1f s", time.monotonic() - started)
