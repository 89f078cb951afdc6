"""The native core as a backend: decoders and encoders on a CPU. Imports no torch."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ostro.backends.backend import OpenedModel, Reasons
from ostro.backends.native.planning import decoder_parts, encoder_parts, native_program
from ostro.backends.native.support import NotNative
from ostro.backends.plan import Parts
from ostro.devices import Memory
from ostro.engine.runner import ModelRunner
from ostro.kernels.cpu.library import PAGE, why_missing
from ostro.models.architecture import Architecture
from ostro.models.description import plain_decoder
from ostro.models.encoder import Encoder
from ostro.system.machine import has_idle_gpu
from ostro.system.requirements import needs

_log = logging.getLogger(__name__)


class NativeBackend:
    name = "native"
    library = None

    def refuses(self, opened: OpenedModel) -> str | None:
        config = opened.config
        if config.backend not in ("auto", self.name):
            return f"backend is {config.backend}"
        # "auto" never divides here: without a GPU or TPU it means one device.
        if config.tensor_parallel not in (1, "auto"):
            return "the model is divided over devices"
        if not opened.kind.has_native_core:
            return f"the model runs on a {opened.kind.label}"
        if (missing := why_missing()) is not None:
            return missing.rstrip(".")
        try:
            return _variant(opened).refuses()
        except NotNative as error:
            return str(error)

    def check(self, opened: OpenedModel, reasons: Reasons) -> None:
        _variant(opened).check()

    def plan(self, opened: OpenedModel, memory: Memory) -> Parts:
        return _variant(opened).plan(memory)

    def load(self, opened: OpenedModel, following: Callable[[], None]) -> ModelRunner:
        runner = _variant(opened).load()
        if opened.config.device == "auto" and has_idle_gpu():
            _log.warning("This machine has a GPU, but the model runs on the CPU. %s", needs("The GPU", "torch"))
        return runner


class _Variant(Protocol):
    """How the core runs a kind of model: a decoder or an encoder."""

    def refuses(self) -> str | None:
        """Raises NotNative like `native_program`."""

    def check(self) -> None: ...
    def plan(self, memory: Memory) -> Parts: ...
    def load(self) -> ModelRunner: ...


def _variant(opened: OpenedModel) -> _Variant:
    """Raises NotNative for a model that is neither a plain decoder nor an encoder."""
    if isinstance(opened.description, Encoder):
        return _Encoding(opened, opened.description)
    described = plain_decoder(opened.description, hybrid=True)
    if isinstance(described, str):
        raise NotNative(described)
    return _Decoding(opened, described)


@dataclass(frozen=True, slots=True)
class _Decoding:
    opened: OpenedModel
    described: Architecture

    def refuses(self) -> str | None:
        config = self.opened.config
        if config.page_size not in (None, PAGE):
            return f"page_size is {config.page_size}, and native kernels take {PAGE}"
        native_program(self.opened.checkpoint, self.described, config.quantize)
        return None

    def check(self) -> None:
        self.opened.config.check_causal()

    def plan(self, memory: Memory) -> Parts:
        return decoder_parts(self.opened, self.described, memory)

    def load(self) -> ModelRunner:
        # Imported late: it imports numpy and maps the library.
        from ostro.backends.native.load import decoder_runner

        return decoder_runner(self.opened, self.described)


@dataclass(frozen=True, slots=True)
class _Encoding:
    opened: OpenedModel
    described: Encoder

    def refuses(self) -> None:
        native_program(self.opened.checkpoint, self.described, self.opened.config.quantize)

    def check(self) -> None:
        self.opened.divided(self.opened.ranks(1)).config.check_encoding(natively=True)

    def plan(self, memory: Memory) -> Parts:
        return encoder_parts(self.opened, self.described)

    def load(self) -> ModelRunner:
        from ostro.backends.native.load import encoder_runner

        return encoder_runner(self.opened, self.described)
