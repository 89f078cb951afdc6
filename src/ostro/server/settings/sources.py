"""Sources of settings: the environment, `.env` files and YAML files, with each value's origin in words."""

import difflib
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import yaml
from pydantic_settings import BaseSettings, DotEnvSettingsSource, EnvSettingsSource

from ostro.config import PREFIX
from ostro.errors import BadRequest
from ostro.server.settings.fields import ServeSettings
from ostro.server.settings.names import (
    ALIASES,
    CONFIG_VARIABLE,
    ENGINE_SECTIONS,
    NOT_SETTINGS,
    RAY_PREFIX,
    REFUSED,
    of_levanter,
    variables_of,
    why_not_served,
)
from ostro.system.env_file import as_in_dotenv

IN_DOTENV, IN_ENVIRONMENT = " in .env", " in the environment"


# Sections of a YAML file that may contain settings, as in `serve: {hrm: {port: 9000}}`; others are other programs'.
_SECTIONS = frozenset({"serve", "hrm", "ostro"})


@dataclass(frozen=True, slots=True)
class Given:
    value: object
    origin: str
    """A description that names the place: `--port`, `PORT in the environment`, `ostro.yaml`."""


def from_environment(source: EnvSettingsSource, place: str) -> dict[str, Given]:
    found = {}
    for name, info in ServeSettings.model_fields.items():
        value, variable, _ = source.get_field_value(info, name)
        if value is not None:
            _check_once(name, source, place)
            # A .env file was parsed as one; the environment's values may come from one that was not.
            is_raw = isinstance(value, str) and not isinstance(source, DotEnvSettingsSource)
            found[name] = Given(as_in_dotenv(variable, value) if is_raw else value, f"{variable}{place}")
    return found


def _check_once(name: str, source: EnvSettingsSource, place: str) -> None:
    """Refuses two of our variables for one setting. Those of other servers may be set for other programs."""
    ours = [
        variable for variable in variables_of(name) if variable.startswith(PREFIX) and source.env_vars.get(variable)
    ]
    if len(ours) > 1:
        raise BadRequest(f"{ours[1]}{place} sets what {ours[0]} has already set. Keep one of the two.", param=name)


def check_environment(names: Iterable[str], place: str = IN_ENVIRONMENT) -> None:
    """Refuses variables that begin with OSTRO_ and are neither settings nor read by another part of the project."""
    ours = {variable for name in ServeSettings.model_fields for variable in variables_of(name)}
    named = [name for name in names if not name.startswith(RAY_PREFIX)]
    check_variables(named, PREFIX, ours | NOT_SETTINGS, place)


def check_variables(names: Iterable[str], prefix: str, known: Collection[str], place: str = IN_ENVIRONMENT) -> None:
    """Refuses unknown variables with this prefix, but for those that Kubernetes sets for a Service of such a name."""
    names = set(names)
    services = [name.removesuffix("SERVICE_HOST") for name in names if name.endswith("_SERVICE_HOST")]
    of_services = tuple(service + part for service in services for part in ("SERVICE_", "PORT"))
    unknown = [name for name in names if name.startswith(prefix) and name not in known]
    for name in sorted(each for each in unknown if not each.startswith(of_services)):
        # With the prefix, any two names would look similar.
        close = difflib.get_close_matches(name.removeprefix(prefix), [each.removeprefix(prefix) for each in known], 1)
        cure = f"Did you mean {prefix}{close[0]}?" if close else "Unset it; docs/configuration.md lists them all."
        raise BadRequest(f"{name}{place} is not a setting. {cure}")


def named_config(directory: Path) -> Path | None:
    """The YAML file named by OSTRO_CONFIG, in the environment or in `.env`: for servers without a command line."""
    dotenv = DotEnvSettingsSource(BaseSettings, env_file=directory / ".env", case_sensitive=True)
    named = as_in_dotenv(CONFIG_VARIABLE, os.environ.get(CONFIG_VARIABLE, "")) or dotenv.env_vars.get(CONFIG_VARIABLE)
    return Path(named) if named else None


@dataclass(frozen=True, slots=True)
class File:
    """The contents of a YAML file."""

    path: Path | None = None
    settings: Mapping[str, Given] = field(default_factory=dict)
    is_training: bool = False
    """Whether it is the YAML of a Levanter training run."""
    notes: tuple[str, ...] = ()


def found_files(directory: Path) -> File:
    """Settings from AI-OS's files in the directory, used if no other file is named."""
    from ostro.server.settings.found_config import find_logging, find_settings

    settings: dict[str, Given] = {}
    notes: list[str] = []
    logging, note = find_logging(directory)
    if logging is not None:
        settings["logging_config"] = Given(logging, f"found at {logging}")
    notes += [] if note is None else [note]
    found = find_settings(directory)
    if found is None:
        return File(settings=settings, notes=tuple(notes))
    return File(found.path, settings | _gathered(found.sections, found.path, {}), notes=(found.note, *notes))


def _gathered(content: object, path: Path, found: dict[str, Given]) -> dict[str, Given]:
    """Adds a file's settings to those already found in it; duplicates are an error."""
    for key, name, value in _settings_in(content, path):
        if name in found:
            raise BadRequest(f"{path}: {key} sets what {found[name].origin} has already set. Keep one of the two.")
        if value is not None:
            found[name] = Given(value, f"{key} in {path}")
    return found


def from_yaml(path: Path | None) -> File:
    if path is None:
        return File()
    from ostro.server.settings.levanter_training import read_training

    content = _read_yaml(path)
    training = read_training(content, path)
    if training is not None:
        found = {name: Given(value, f"{key} in {path}") for name, (key, value) in training.settings.items()}
        ours = {key: value for key, value in training.rest.items() if _is_ours(key) or _is_engines(key, value)}
        _gathered(ours, path, found)
        ignored = [*(str(key) for key in training.rest if key not in ours), *training.unused]
        note = f"{path} is a Levanter training config, of which serving uses {', '.join(_keys(found.values()))}"
        return File(path, found, True, (f"{note}; ignored: {', '.join(ignored)}." if ignored else f"{note}.",))
    content, foreign = _without_foreign(content)
    note = f"{path}: sections of other programs are ignored: {', '.join(foreign)}."
    return File(path, _gathered(content, path, {}), notes=(note,) if foreign else ())


def _without_foreign(content: object) -> tuple[object, list[str]]:
    """For a file with a `serve` section, shared with other programs: our part, and the names of their sections."""
    if not isinstance(content, dict) or not isinstance(content.get("serve"), dict):
        return content, []
    others = [key for key, value in content.items() if isinstance(value, dict) and not _resembles_ours(key)]
    # Levanter's files have no section `serve`, so these belong to another program, too.
    foreign = [key for key, value in content.items() if key in others or _is_engines(key, value)]
    return {key: value for key, value in content.items() if key not in foreign}, [str(key) for key in foreign]


def _resembles_ours(key: object) -> bool:
    """Whether it is a setting or a section, possibly misspelt."""
    return _is_ours(key) or bool(difflib.get_close_matches(str(key).replace("-", "_"), _known_keys(), 1))


def _keys(given: Iterable[Given]) -> list[str]:
    return [each.origin.partition(" in ")[0] for each in given]


def _read_yaml(path: Path) -> object:
    try:
        text = path.read_text(encoding="utf-8")
        content: object = yaml.safe_load(text)
    except yaml.constructor.ConstructorError as error:
        from ostro.server.settings.levanter_training import load_training, read_training

        # Levanter's files may contain its own tags; in ours, a tag is a mistake.
        if read_training(content := load_training(text), path) is None:
            raise _not_yaml(path, error) from error
    except OSError as error:
        raise BadRequest(f"Cannot read the config file {path}: {error.strerror}. Check the path.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise _not_yaml(path, error) from error
    return content


def _not_yaml(path: Path, error: Exception) -> BadRequest:
    return BadRequest(f"The config file {path} is not valid YAML: {' '.join(str(error).split())}.")


def _is_ours(key: object) -> bool:
    """Whether a top-level YAML key is a setting or a section of settings."""
    name = str(key).replace("-", "_")
    return name in _SECTIONS or name in _known_keys()


def _is_engines(key: object, value: object) -> bool:
    """Whether it is the engine's section of Levanter's config."""
    return key in ENGINE_SECTIONS and isinstance(value, dict)


def _known_keys() -> dict[str, str]:
    """Settings by their YAML keys."""
    known = {name: name for name in ServeSettings.model_fields}
    return known | {alias: name for name, names in ALIASES.items() for alias in names.also}


def _can_be_off(name: str) -> bool:
    """Whether `off` is a value of the setting, rather than the false of a switch."""
    kind = ServeSettings.model_fields[name].annotation
    return any("off" in get_args(each) for each in (kind, *get_args(kind)))


def _settings_in(content: object, path: Path) -> Iterable[tuple[str, str, object]]:
    """Key, setting and value of each entry in a file or section."""
    if content is None:
        return
    if not isinstance(content, dict):
        raise BadRequest(f"The config file {path} must hold settings, one per line, such as `port: 8000`.")
    known = _known_keys()
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name in _SECTIONS and isinstance(value, dict | None):
            yield from _settings_in(value, path)
        elif _is_engines(key, value):
            yield from _engine_settings(str(key), value, path)
        elif name in REFUSED:
            raise BadRequest(f"{path}: {key} is not supported: {REFUSED[name]}")
        elif name in known:
            # YAML reads an unquoted off as false.
            is_off = value is False and _can_be_off(known[name])
            yield str(key), known[name], "off" if is_off else value
        else:
            close = difflib.get_close_matches(name, known, 1)
            cure = f"Did you mean {close[0]}?" if close else "docs/configuration.md lists them all."
            raise BadRequest(f"{path}: {key} is not a setting. {cure}")


def _engine_settings(section: str, content: Mapping[str, object], path: Path) -> Iterable[tuple[str, str, object]]:
    """The same of the engine's section in Levanter's config, whose keys are flags, too."""
    for each, value in content.items():
        key = f"{section}.{each}"
        setting = of_levanter(key)
        if setting is None:
            raise BadRequest(f"{path}: {key} is not supported: {why_not_served(key)}.")
        yield key, setting, value
