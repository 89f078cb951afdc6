"""ostro collect-env: what a bug report should say about the machine and the installation. Shows no secrets."""

import argparse
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from ostro.cli.parser import describe
from ostro.errors import Unsupported
from ostro.kernels.cpu.huge_pages import setting
from ostro.system.machine import (
    cpu_limit,
    cpu_model,
    describe_gpus,
    free_memory,
    in_container,
    num_cpus,
    tpu_memory,
    vector_extensions,
)
from ostro.system.topology import threads_here
from ostro.version import __version__

# Extras that only developers install.
_DEVELOPING = re.compile(r"extra == ['\"](dev|clients|dist|docs|eval)['\"]")
# What matters for speed and correctness, and comes with other packages.
_INDIRECT = ("jaxlib", "libtpu", "triton")
_PREFIXES = ("OSTRO_", "CUDA_", "JAX_", "OMP_", "TRITON_", "XLA_")
_OTHERS = ("HF_HOME", "HF_HUB_OFFLINE", "LOCAL_DEV", "LOCAL_MODEL_CACHE", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_SECRET_WORDS = {"AUTH", "CREDENTIALS", "HEADERS", "KEY", "KEYS", "PASSWORD", "SECRET", "TOKEN"}
_USER_OF_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_QUERY_OF_URL = re.compile(r"(?<=\?)\S+")
_HIDDEN = "***"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        {"ostro collect-env": "print it, to paste into a report"},
        "Keys, tokens and passwords are hidden, and so is the name of your home directory. Read the output before you "
        "publish it. `ostro serve --print-config` shows a server's settings.",
    )


def run(args: argparse.Namespace) -> int:
    for title, rows in _sections().items():
        print(f"{title}:", *(f"  {name}: {value}" for name, value in rows.items()), sep="\n")
    return 0


def _sections() -> dict[str, Mapping[str, str]]:
    return {
        "ostro": {"version": __version__, "native core": _native_core()},
        "system": _system(),
        "processors": _processors(),
        "packages": dict(_packages()),
        "variables": shown_variables(os.environ),
    }


def _native_core() -> str:
    from ostro.kernels.cpu.library import instruction_sets, why_missing

    try:
        return why_missing() or ", ".join(instruction_sets())
    except Unsupported as error:
        return str(error)


def _system() -> dict[str, str]:
    return {
        "platform": platform.platform(),
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "executable": _without_home(sys.executable),
        "container": "yes" if in_container() else "no",
    }


def _processors() -> dict[str, str]:
    limit, tpu = cpu_limit(), tpu_memory()
    rows = {
        "cpu": f"{cpu_model() or platform.processor() or 'unknown'}, {platform.machine()}",
        "cpus": f"{num_cpus()} of {os.cpu_count()}" + ("" if limit is None else f", limited to {limit}"),
        "threads": threads_here().reason,
        "extensions": " ".join(vector_extensions()) or "unknown",
        "huge pages": setting() or "none",
        "free memory": f"{free_memory() >> 20} MiB",
        "gpus": "; ".join(describe_gpus()) or "none",
    }
    return rows if tpu is None else rows | {"tpu": f"{tpu >> 30} GiB each"}


def _packages() -> Iterator[tuple[str, str]]:
    """Installed packages that Ostro asks for, with their versions."""
    for name in sorted({*_required(), *_INDIRECT}):
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _required() -> Iterator[str]:
    try:
        requirements = metadata.requires("ostro") or []
    except metadata.PackageNotFoundError:
        # A source tree on PYTHONPATH.
        return
    for requirement in requirements:
        name = re.match(r"[\w.-]+", requirement)
        if name is not None and not _DEVELOPING.search(requirement):
            yield name[0]


def shown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that affect Ostro, without secrets."""
    chosen = (name for name in sorted(environment) if name.startswith(_PREFIXES) or name in _OTHERS)
    return {name: _shown(name, environment[name]) for name in chosen}


def _shown(name: str, value: str) -> str:
    if _SECRET_WORDS & set(name.upper().split("_")):
        return _HIDDEN
    return _without_home(_QUERY_OF_URL.sub(_HIDDEN, _USER_OF_URL.sub(_HIDDEN, value)))


def _without_home(text: str) -> str:
    """The home directory often contains its owner's name."""
    home = str(Path.home())
    return text if home == "/" else text.replace(home, "~")
