"""Finds a model's packed file, or has it made, and puts a runner on it. Imports torch only to make one.

ROOT/packed/DIGEST.ostro     ROOT is the cache of models; the digest is of a checkpoint's files and how they are packed
"""

import hashlib
import json
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from ostro.config import EngineConfig
from ostro.errors import BadCheckpoint, DiskFull, DownloadFailed
from ostro.kernels.cpu.library import BITS, PAGE, instruction_sets, library, panel_of, why_missing
from ostro.kernels.cpu.packed_file import PackedFile, PackedWriter
from ostro.kernels.cpu.program import ProgramSpec
from ostro.machine import cpu_limit
from ostro.models.hrm_config import is_hrm
from ostro.runner.native.runner import NativeRunner
from ostro.weights import Checkpoint
from ostro.weights.cache import cache_root, publish, work_directory
from ostro.weights.gguf_checkpoint import GgufCheckpoint
from ostro.weights.hf_checkpoint import HfCheckpoint

# Changes with what a packed file holds: older files are made again.
_FORMAT = 1

_log = logging.getLogger(__name__)


def native_runner(checkpoint: Checkpoint, config: EngineConfig) -> NativeRunner | str:
    """A runner, or why the model cannot run natively."""
    if (reason := _refusal(checkpoint, config)) is not None:
        return reason
    config.check_causal()
    threads = config.threads or min(cpu_limit() or 1024, _cores())
    for isa in instruction_sets():
        found = _packed(checkpoint, config, panel_of(isa), threads)
        if isinstance(found, PackedFile):
            return NativeRunner.sized(found, config, isa=isa, threads=threads, pooling=checkpoint.pooling)
        reason, another_may = found
        if not another_may:
            break
    assert reason is not None
    return reason


def packed_path(checkpoint: Checkpoint, config: EngineConfig, panel: int) -> Path:
    """Where a checkpoint's packed file is, or would be."""
    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in _files(checkpoint)]
    made = (_FORMAT, library().ostro_version(), panel)
    facts = [made, config.quantize, config.max_seq_len, dict(checkpoint.config), files]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]
    return cache_root() / "packed" / f"{digest}.ostro"


def _refusal(checkpoint: Checkpoint, config: EngineConfig) -> str | None:
    if (missing := why_missing()) is not None:
        return missing.rstrip(".")
    if is_hrm(checkpoint.config):
        return "an HRM has no native kernels"
    if config.adapters:
        return "adapters have no native kernels"
    if config.page_size not in (None, PAGE):
        return f"page_size is {config.page_size}, and native kernels take {PAGE}"
    return None


def _packed(checkpoint: Checkpoint, config: EngineConfig, panel: int, threads: int) -> PackedFile | tuple[str, bool]:
    """The file; or why there is none, and whether there may be one for panels of another width."""
    path = packed_path(checkpoint, config, panel)
    try:
        packed = PackedFile(path)
        ProgramSpec.from_json(packed.program)
    except (FileNotFoundError, NotADirectoryError):
        return _pack_and_keep(checkpoint, config, panel, threads, path)
    except (BadCheckpoint, ValueError, KeyError, TypeError):
        # A file that was damaged, or of another make.
        with suppress(OSError):
            path.unlink()
        return _pack_and_keep(checkpoint, config, panel, threads, path)
    with suppress(OSError):
        os.utime(path)
    return packed


def _pack_and_keep(
    checkpoint: Checkpoint, config: EngineConfig, panel: int, threads: int, path: Path
) -> PackedFile | tuple[str, bool]:
    from ostro.runner.native.lowering import NotNative, WrongPanel

    try:
        try:
            with work_directory(path) as directory:
                # Another process may have been faster.
                if not path.is_file():
                    _pack(checkpoint, config, panel, threads, directory / path.name)
                    publish(directory / path.name, path)
            return PackedFile(path)
        except (DiskFull, DownloadFailed) as error:
            _log.warning("%s Until then the weights are packed anew at every start.", error.message)
        with TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
            _pack(checkpoint, config, panel, threads, Path(scratch, path.name))
            return PackedFile(Path(scratch, path.name))
    except NotNative as error:
        return str(error), isinstance(error, WrongPanel)
    except OSError as error:
        return f"its packed weights cannot be written ({error.strerror or error})", False


def _pack(checkpoint: Checkpoint, config: EngineConfig, panel: int, threads: int, target: Path) -> None:
    """Raises NotNative for a model that the native core does not know."""
    import torch

    from ostro.models.registry import build_model
    from ostro.runner.native.lowering import check, lower

    model = build_model(
        checkpoint.config, max_seq_len=config.max_seq_len, dtype=torch.float32, device=torch.device("meta")
    )
    check(model, panel)
    started = time.monotonic()
    _log.info("packing the weights, once")
    with PackedWriter(target, panel, threads=threads) as writer:
        writer.finish(lower(model, checkpoint, writer, panel=panel, bits=BITS[config.quantize]).to_json())
    _log.info("packed in %.1f s", time.monotonic() - started)


def _files(checkpoint: Checkpoint) -> list[Path]:
    """The files that a checkpoint's tensors are in, or may be in."""
    if isinstance(checkpoint, GgufCheckpoint):
        return sorted({weight.path.resolve() for weight in checkpoint.weights})
    if isinstance(checkpoint, HfCheckpoint):
        return sorted(path.resolve() for path in checkpoint.files)
    path = checkpoint.path.resolve()
    return [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
