"""The reference of settings: tables from ServeSettings and EngineConfig."""

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

from docs_reference.markup import code, codes, table
from ostro.config import SETTINGS, EngineConfig
from ostro.server.settings import (
    ALIASES,
    GROUPS,
    IMPLIED,
    REFUSED,
    Bytes,
    Directory,
    Hosts,
    References,
    Secrets,
    ServeSettings,
    Texts,
)

# Pages with more detail.
SEE = {
    "checkpoint_path": "levanter.md",
    "levanter_config": "levanter.md",
    "models": "many-models.md",
    "lora": "lora.md",
    "memory_budget": "many-models.md#memory-and-eviction",
    "model_settings": "many-models.md#administration",
    "hrm_dialect": "hrm.md",
    "hrm_config": "hrm.md#settings",
    "quantize": "cpu.md#precision",
    "kv_dtype": "cpu.md#precision",
    "backend": "cpu.md",
    "tensor_parallel": "parallel.md",
    "cpu_experts": "gpu.md#experts-on-the-cpu",
    "deterministic": "gpu.md#options",
    "ui": "playground.md",
    "otlp_endpoint": "observability.md",
    "profile": "observability.md#profiles",
}
_KINDS = {
    Bytes: "size",
    Texts: "list",
    Hosts: "list",
    Secrets: "list",
    References: "text",
    Path: "file",
    Directory: "directory",
    str: "text",
    int: "integer",
}
_DEFAULT = re.compile(r" \(default: (.*)\)$")


def parts() -> dict[str, str]:
    return {
        "settings": _settings(),
        "names": _names(),
        "refused-settings": _refused(),
        "engine-config": _engine_config(),
    }


def _settings() -> str:
    found = [f"### {title}\n\n{table(HEAD, rows)}" for title, rows in _groups()]
    return "\n".join(found)


HEAD = ("setting", "takes", "default", "meaning")


def _groups() -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    rows: list[tuple[str, ...]] = []
    title = ""
    for name in ServeSettings.model_fields:
        if name in GROUPS:
            if rows:
                yield title, rows
            title, rows = GROUPS[name], []
        rows.append(_row(name))
    yield title, rows


def _row(name: str) -> tuple[str, ...]:
    field = ServeSettings.model_fields[name]
    hint = get_type_hints(ServeSettings, include_extras=True)[name]
    words, default = _split(str(field.description))
    return code(name), _kind(hint), default or _shown(field.default, hint), _meaning(name, words, hint)


def _split(description: str) -> tuple[str, str]:
    """A setting's meaning and default."""
    found = _DEFAULT.search(description)
    return (description, "") if found is None else (description[: found.start()], _marked(found[1], ()))


def _meaning(name: str, words: str, hint: object) -> str:
    text = _marked(words, _choices(hint))
    if name in IMPLIED:
        text += f"; implies {codes(f'{key}: {value}' for key, value in IMPLIED[name].items())} unless they are set"
    return text + (f" ([more]({SEE[name]}))" if name in SEE else "")


def _marked(words: str, choices: tuple[str, ...]) -> str:
    """Names and values set as code."""
    names = [name for name in ServeSettings.model_fields if "_" in name]
    exact = "|".join(re.escape(each) for each in sorted([*names, *choices], key=len, reverse=True))
    other = r"(?:gs|s3)://[\w…/]*|pypi:[\w=]+|NAME=[\w…]+|\.jinja|tokenizer\.json|/admin|0\.0\.0\.0|Retry-After"
    return re.sub(rf"(?<![\w/`.])(?:{exact}|{other})(?![\w`])", lambda found: code(found[0]), words)


def _kind(hint: object) -> str:
    if hint in _KINDS:
        return _KINDS[hint]
    if get_origin(hint) is Literal:
        return codes(_choices(hint))
    if hint is bool:
        return "on, off"
    if get_origin(hint) is Annotated:
        return _kind(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return ", ".join(_kind(each) for each in get_args(hint) if each is not NoneType)
    return "number" if hint is float else "table"


def _choices(hint: object) -> tuple[str, ...]:
    """The values that a setting may take."""
    if get_origin(hint) in (Union, UnionType):
        return tuple(choice for each in get_args(hint) for choice in _choices(each))
    return tuple(get_args(hint)) if get_origin(hint) is Literal else ()


def _shown(value: object, hint: object = None) -> str:
    match value:
        case None | () | {}:
            return "none"
        case bool():
            return "on" if value else "off"
        case tuple():
            return codes(value)
        case int() if hint is not None and _kind(hint) == "size":
            return code(f"{value >> 20}M")
        case int() | float():
            return f"{value:g}" if isinstance(value, float) else str(value)
        case _:
            return code(value)


def _names() -> str:
    rows = [
        (code(name), codes((*ALIASES[name].also, *ALIASES[name].levanter)), codes(ALIASES[name].foreign))
        for name in ServeSettings.model_fields
        if name in ALIASES
    ]
    return table(("setting", "other names", "variables of other servers"), rows)


def _refused() -> str:
    rows = [(f"{code('--' + name.replace('_', '-'))}, {code(name)}", why) for name, why in REFUSED.items()]
    return table(("refused", "because"), rows)


def _engine_config() -> str:
    """The server's settings by name, and a table of those that only Python has."""
    hints = get_type_hints(EngineConfig)
    shared, rows = [], []
    for field in fields(EngineConfig):
        if field.name in ServeSettings.model_fields:
            shared.append(field.name)
            continue
        words, default = _split(SETTINGS[field.name].meaning)
        kind, choices = _python_kind(hints[field.name]), _choices(hints[field.name])
        rows.append((code(field.name), kind, default or code(repr(field.default)), _marked(words, choices)))
    return f"The same as [the server's](configuration.md#settings): {codes(shared)}.\n\n{table(HEAD, rows)}"


def _python_kind(hint: object) -> str:
    if hint is NoneType:
        return code("None")
    if get_origin(hint) is Literal:
        return codes(_choices(hint))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_python_kind(each) for each in get_args(hint))
    return code(hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint))
