"""The native core as a backend: decoders and encoders on a CPU. Imports no torch."""

import logging
from collections.abc import Callable

from ostro.backends.backend import OpenedModel, Reasons
from ostro.backends.native.planning import native_program, planned_parts
from ostro.backends.native.support import NotNative
from ostro.backends.plan import Parts
from ostro.devices import Memory
from ostro.engine.runner import ModelRunner
from ostro.kernels.cpu.library import PAGE, why_missing
from ostro.models.encoder import Encoder
from ostro.system.extras import needs
from ostro.system.machine import has_idle_gpu

_log = logging.getLogger(__name__)


class NativeBackend:
    name = "native"
    library = None

    def refuses(self, opened: OpenedModel) -> str | None:
        config = opened.config
        if config.backend not in ("auto", self.name):
            return f"backend is {config.backend}"
        # "auto" never is: without a GPU or TPU it means one device.
        if config.tensor_parallel not in (1, "auto"):
            return "the model is divided over devices"
        if not opened.kind.has_native_core:
            return f"the model runs on a {opened.kind.label}"
        if (missing := why_missing()) is not None:
            return missing.rstrip(".")
        if config.page_size not in (None, PAGE) and not isinstance(opened.description, Encoder):
            return f"page_size is {config.page_size}, and native kernels take {PAGE}"
        try:
            native_program(opened.checkpoint, opened.description, config.quantize)
        except NotNative as error:
            return str(error)
        return None

    def check(self, opened: OpenedModel, reasons: Reasons) -> None:
        if isinstance(opened.description, Encoder):
            opened.divided(opened.ranks(1)).config.check_encoding(natively=True)
        opened.config.check_causal()

    def plan(self, opened: OpenedModel, memory: Memory) -> Parts:
        return planned_parts(opened, memory)

    def load(self, opened: OpenedModel, following: Callable[[], None]) -> ModelRunner:
        # Imports numpy, and maps the library.
        from ostro.backends.native.load import native_runner

        runner = native_runner(opened)
        if opened.config.device == "auto" and has_idle_gpu():
            _log.warning("This machine has a GPU, but the model runs on the CPU. %s", needs("The GPU", "torch"))
        return runner
