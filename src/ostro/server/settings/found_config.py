"""AI-OS's config files in their usual places: config/default.yaml and config/logging.yaml.

Other programs use these file names too, so only what is clearly meant for a server is used, and a file that cannot be
used is mentioned in the log and otherwise ignored.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import yaml

SETTINGS, LOGGING = Path("config", "default.yaml"), Path("config", "logging.yaml")
# Keys that name the code of a handler or formatter.
_CODE_KEYS = ("class", "()")


@dataclass(frozen=True, slots=True)
class FoundConfig:
    """A file's server settings, and a note about what was used and what was not."""

    path: Path
    sections: Mapping[str, object]
    note: str


def find_settings(directory: Path) -> FoundConfig | None:
    """The sections `serve: hrm:` and `ostro:` of the settings file in a directory; None if there is no such file."""
    path = directory / SETTINGS
    if not path.is_file():
        return None
    content, trouble = _read(path)
    if trouble is not None:
        return FoundConfig(path, {}, f"{path} is not used: {trouble}.")
    serve = content.get("serve")
    hrm = serve.get("hrm") if isinstance(serve, Mapping) else None
    sections = {name: value for name, value in (("hrm", hrm), ("ostro", content.get("ostro"))) if value is not None}
    if not sections:
        return FoundConfig(path, {}, f"{path} is not used: it has no section serve.hrm or ostro.")
    ignored = [str(key) for key in content if key not in ("serve", "ostro")]
    if isinstance(serve, Mapping):
        ignored += [f"serve.{key}" for key in serve if key != "hrm"]
    taken = " and ".join("serve.hrm" if name == "hrm" else name for name in sections)
    note = f"settings come from {path}, its section {taken}"
    return FoundConfig(path, sections, f"{note}; ignored: {', '.join(ignored)}." if ignored else f"{note}.")


def find_logging(directory: Path) -> tuple[Path | None, str | None]:
    """The logging config in a directory if the code it names is installed, and a note about it."""
    path = directory / LOGGING
    if not path.is_file():
        return None, None
    content, trouble = _read(path)
    if trouble is None and (missing := next((name for name in _code(content) if not _is_here(name)), None)):
        trouble = f"it names {missing}, which is not installed"
    if trouble is not None:
        return None, f"{path} is not used: {trouble}."
    return path, f"logging is configured by {path}."


def _read(path: Path) -> tuple[Mapping[str, object], str | None]:
    """The file's table, or what is wrong with it."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        return {}, " ".join(str(error).split())
    return (content, None) if isinstance(content, Mapping) else ({}, "it holds no sections")


def _code(content: object) -> Iterator[str]:
    if isinstance(content, Mapping):
        yield from (str(content[key]) for key in _CODE_KEYS if isinstance(content.get(key), str))
        for value in content.values():
            yield from _code(value)


def _is_here(name: str) -> bool:
    return find_spec(name.partition(".")[0]) is not None
