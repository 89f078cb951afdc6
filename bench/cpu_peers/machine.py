"""The machine that is measured: what its figures depend on, and which of its CPUs are used. Knows /proc and /sys."""

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_FILES = {
    "kernel": "/proc/sys/kernel/osrelease",
    "transparent_huge_pages": "/sys/kernel/mm/transparent_hugepage/enabled",
    "governor": "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
    "load": "/proc/loadavg",
    "pressure": "/proc/pressure/cpu",
}


def describe() -> dict[str, str]:
    found = {name: text for name, path in _FILES.items() if (text := _read(Path(path)))}
    for name, command in (("lscpu", ["lscpu"]), ("cpus", ["lscpu", "-e"])):
        try:
            found[name] = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            continue
    return found


def in_one_line(about: dict[str, str]) -> str:
    wanted = ("Model name", "CPU(s)", "Thread(s) per core", "L3 cache", "NUMA node(s)")
    lines = dict(line.split(":", 1) for line in about.get("lscpu", "").splitlines() if ":" in line)
    words = [f"{name}: {lines[name].strip()}" for name in wanted if name in lines]
    flags = lines.get("Flags", "").split()
    words.append(" ".join(flag for flag in ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8") if flag in flags))
    words += [f"{name} {about[name]}" for name in ("transparent_huge_pages", "load") if name in about]
    return "; ".join(words)


def choose_cpus(threads: int, allowed: Iterable[int], cpus: Path = _CPUS) -> list[int]:
    """So many of the allowed CPUs, of different cores as far as there are any."""
    seen: dict[str, int] = {}
    ranked = []
    for cpu in sorted(allowed):
        core = _read(cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu)
        ranked.append((seen.get(core, 0), cpu))
        seen[core] = seen.get(core, 0) + 1
    return sorted(cpu for _, cpu in sorted(ranked)[:threads])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def pin(threads: int) -> list[int]:
    """Keeps this process, and those that it starts, to as many CPUs as there are threads."""
    if not hasattr(os, "sched_setaffinity"):
        return []
    chosen = choose_cpus(threads, os.sched_getaffinity(0))
    os.sched_setaffinity(0, chosen)
    return chosen
