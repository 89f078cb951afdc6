"""Builds a native runner from a checkpoint: finds the model's packed weights or has them made. Imports no torch."""

import logging
import time
from collections.abc import Callable
from typing import BinaryIO

from ostro.backends.native.encoder import NativeEncoderRunner
from ostro.backends.native.identity import packed_key
from ostro.backends.native.lora import NativeAdapters
from ostro.backends.native.packed_cache import with_packed_weights
from ostro.backends.native.packing import pack
from ostro.backends.native.runner import NativeRunner
from ostro.backends.native.support import NotNative, WrongPanel, native_architecture
from ostro.config import EngineConfig
from ostro.devices import DEVICE_KINDS
from ostro.kernels.cpu.library import BITS, PAGE, instruction_sets, panel_of, why_missing
from ostro.kernels.cpu.packed_file import PackedFile, PackedWriter
from ostro.models.architecture import Architecture
from ostro.models.encoder import Encoder
from ostro.models.hrm_config import is_hrm
from ostro.models.registry import describe, is_encoder
from ostro.system.machine import num_cpus
from ostro.weights import Checkpoint
from ostro.weights.adapter import read_adapter

_log = logging.getLogger(__name__)


def native_runner(checkpoint: Checkpoint, config: EngineConfig) -> NativeRunner | NativeEncoderRunner | str:
    """A runner, or the reason why the model cannot run natively."""
    if (reason := _refusal(checkpoint, config)) is not None:
        return reason
    if is_encoder(checkpoint.config):
        config.check_encoding(natively=True)
    config.check_causal()
    threads = config.threads or num_cpus()
    adapters = _adapters(checkpoint, config)
    for isa in instruction_sets():
        found = _runner(checkpoint, config, isa, threads, adapters)
        if not isinstance(found, _NotPacked):
            return found
        reason = found.reason
        if not found.another_may:
            break
    assert reason is not None
    return reason


def _refusal(checkpoint: Checkpoint, config: EngineConfig) -> str | None:
    if (missing := why_missing()) is not None:
        return missing.rstrip(".")
    if is_hrm(checkpoint.config):
        return "an HRM has no native kernels"
    if config.page_size not in (None, PAGE) and not is_encoder(checkpoint.config):
        return f"page_size is {config.page_size}, and native kernels take {PAGE}"
    return None


def _adapters(checkpoint: Checkpoint, config: EngineConfig) -> NativeAdapters | None:
    """Reads adapters before the weights are packed, so that those that do not fit fail at once."""
    described = describe(checkpoint.config, max_seq_len=config.max_seq_len)
    if not config.adapters or not isinstance(described, Architecture):
        return None
    return NativeAdapters(described, {name: read_adapter(path) for name, path in config.adapters})


class _NotPacked(Exception):
    """The reason why a model could not be packed, and whether another panel width might work."""

    def __init__(self, reason: str, *, another_may: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.another_may = reason, another_may


def _runner(
    checkpoint: Checkpoint, config: EngineConfig, isa: str, threads: int, adapters: NativeAdapters | None
) -> NativeRunner | NativeEncoderRunner | _NotPacked:
    panel = panel_of(isa)
    key = packed_key(checkpoint, config, panel)

    def write(file: BinaryIO, make_room: Callable[[int], None]) -> None:
        _pack(checkpoint, config, PackedWriter(file, panel, key=key.digest, threads=threads), make_room)

    def use(packed: PackedFile) -> NativeRunner | NativeEncoderRunner:
        described = describe(checkpoint.config, max_seq_len=config.max_seq_len)
        if isinstance(described, Encoder):
            return _encoder_runner(packed, described, checkpoint, config, isa, threads)
        return NativeRunner.sized(
            packed,
            DEVICE_KINDS["cpu"].resolve(config),
            isa=isa,
            threads=threads,
            pooling=checkpoint.pooling,
            adapters=adapters,
        )

    try:
        return with_packed_weights(key, write, use)
    except _NotPacked as error:
        return error
    except OSError as error:
        return _NotPacked(f"its packed weights cannot be written ({error.strerror or error})")


def _encoder_runner(
    packed: PackedFile, described: Encoder, checkpoint: Checkpoint, config: EngineConfig, isa: str, threads: int
) -> NativeEncoderRunner:
    cpu = DEVICE_KINDS["cpu"]
    return NativeEncoderRunner(
        packed,
        described,
        checkpoint.pooling,
        isa=isa,
        max_batch_tokens=cpu.encoded_tokens(config),
        max_batch_seqs=cpu.resolve(config).max_batch_seqs,
        threads=threads,
    )


def _pack(checkpoint: Checkpoint, config: EngineConfig, writer: PackedWriter, make_room: Callable[[int], None]) -> None:
    try:
        described = native_architecture(describe(checkpoint.config, max_seq_len=config.max_seq_len), writer.panel)
        started = time.monotonic()
        _log.info("packing the weights, once")
        program = pack(described, checkpoint, writer, bits=BITS[config.quantize], make_room=make_room)
    except NotNative as error:
        raise _NotPacked(str(error), another_may=isinstance(error, WrongPanel)) from error
    writer.finish(program.to_json())
    _log.info("packed in %.1f s", time.monotonic() - started)
