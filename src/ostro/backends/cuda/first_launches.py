"""Launches kernels for the first time, before a model's first step: all that steps will need, and, if it is not known
yet which matmuls are our own, those that are measured to find out.
"""

import logging
import time

from ostro.backends.cuda.attention import AttentionWorkspace
from ostro.backends.cuda.choices import Choices, Gpu, choose, conceivable, keep, known
from ostro.backends.cuda.compiling import Compiler
from ostro.backends.cuda.expert_launches import Job
from ostro.backends.cuda.fused import FusedDecoder
from ostro.backends.cuda.measuring import DeviceClock, l2_cache_bytes, this_gpu
from ostro.kernels.gpu.tilings import Matmul

_log = logging.getLogger(__name__)


def compile_kernels(decoder: FusedDecoder, attention: AttentionWorkspace, kernel_choices: str) -> None:
    """Decides which of the decoder's matmuls are our own, as `EngineConfig.kernel_choices` says, and compiles what its
    steps will need.
    """
    device = attention.scratch.arrived.device
    gpu, compiler = this_gpu(device), _compiler(decoder, attention)
    decoder.choices = _known(decoder, kernel_choices, gpu)
    unknown = _to_measure(decoder, decoder.choices, kernel_choices)
    if not unknown:
        compiler.compile(decoder.choices)
        return
    clock = _clock(decoder, cache_bytes=l2_cache_bytes(device))
    compiler.compile(decoder.choices, clock.trials(unknown, gpu))
    started = time.monotonic()
    measured = choose(unknown, gpu, clock)
    _log.info("measured kernels for %d matmuls in %.1f s", len(unknown), time.monotonic() - started)
    for each in unknown:
        _log.info("our own kernel computes %s for %s rows", each, measured.own_rows(each))
    keep(measured, gpu)
    decoder.choices |= measured
    compiler.compile_matmuls(decoder.choices)


def launches(decoder: FusedDecoder, attention: AttentionWorkspace, kernel_choices: str, gpu: Gpu) -> list[Job]:
    """What `compile_kernels` launches on this GPU, whatever it will choose."""
    compiler, choices = _compiler(decoder, attention), _known(decoder, kernel_choices, gpu)
    unknown = _to_measure(decoder, choices, kernel_choices)
    if not unknown:
        return compiler.launches(choices)
    found = compiler.launches(choices, _clock(decoder).trials(unknown, gpu))
    for each in conceivable(unknown, gpu):
        found += compiler.matmul_launches(choices | each)
    return found


def _known(decoder: FusedDecoder, kernel_choices: str, gpu: Gpu) -> Choices:
    return known(kernel_choices, gpu).of(decoder.matmuls)


def _to_measure(decoder: FusedDecoder, choices: Choices, kernel_choices: str) -> list[Matmul]:
    return [each for each in decoder.matmuls if each not in choices] if kernel_choices == "auto" else []


def _clock(decoder: FusedDecoder, cache_bytes: int = 0) -> DeviceClock:
    activation = decoder.layers[0].mlp.activation
    return DeviceClock(decoder.matmuls, activation, overlaps=decoder.overlaps, cache_bytes=cache_bytes)


def _compiler(decoder: FusedDecoder, attention: AttentionWorkspace) -> Compiler:
    return Compiler(
        decoder.model,
        decoder.layers,
        attention.scratch,
        kv_dtype=attention.pages.memory.dtype,
        overlaps=decoder.overlaps,
        leads_from_attention=decoder.leads_from_attention,
    )
