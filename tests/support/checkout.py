"""Paths of the project's files, for tests of files that are not code, and facts that deployments must agree with."""

import importlib.util
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

from doc_pages import tables

from ostro.engine.counters import Counters
from ostro.server.settings import ServeSettings, variables_of
from ostro.server.telemetry.metrics import Metrics, Served

ROOT = Path(__file__).parents[2]

# Read elsewhere than in the server's settings.
_OTHER = {"HF_HOME", "HF_TOKEN", "HOME", "PATH"}
_OTHER |= {
    "TRITON_CACHE_DIR",
    "CC",
    "LD_LIBRARY_PATH",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    "PYTHONDONTWRITEBYTECODE",
    "XDG_CACHE_HOME",
}


def setting_variables() -> set[str]:
    """Environment variables that a user sets: the server's settings, and where models are kept."""
    own = {variable for name in ServeSettings.model_fields for variable in variables_of(name)}
    return own | {"OSTRO_CONFIG", "OSTRO_CACHE", "OSTRO_CACHE_LIMIT", "LOCAL_MODEL_CACHE"}


def known_variables() -> set[str]:
    """Every environment variable that the server, or a library below it, reads."""
    return setting_variables() | _OTHER


def haproxy_variables(settings: ServeSettings) -> dict[str, str]:
    """Ray's variables for a cluster that sends requests straight to replicas, from the table in docs/ray.md."""
    [table] = [each for each in tables(ROOT / "docs" / "ray.md") if each.section == "Straight to replicas"]
    told = {name.strip("`"): value.strip("`") for name, value, _ in table.rows}
    of_settings = {name: f"{getattr(settings, value):g}" for name, value in told.items() if hasattr(settings, value)}
    return told | of_settings


class _NoModels:
    first_name = "none"
    num_loads = num_evictions = num_load_failures = num_waiting = num_inside = 0

    def loaded(self) -> Sequence[tuple[str, Served]]:
        return ()

    def totals(self) -> Sequence[tuple[str, Counters]]:
        return ()

    def held(self) -> Mapping[str, int]:
        return {}


def exported_metrics() -> set[str]:
    """Names of all metrics that a server exports, without suffixes that Prometheus adds, such as _total."""
    nothing = _NoModels()
    return {family.name for family in Metrics(nothing, nothing, nothing).registry.collect()}


ENGINE_STOP_SECONDS = 6
"""Seconds of shutdown beyond the drain window: engines are asked, then killed, and the last bytes go out."""


@cache
def install_script() -> ModuleType:
    """scripts/install.py as a module; it belongs to no package."""
    spec = importlib.util.spec_from_file_location("ostro_install", ROOT / "scripts" / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mark_as_installed(venv: Path, *extras: str) -> None:
    """Marks the environment so that scripts/install.py finds nothing to do there."""
    script = install_script()
    project, record = script.Project(), script.Record(venv)
    record.note_packages(project, extras)
    record.note_native(project, script.find_compiler(), script.ALL_CPUS)
