"""Sampling parameters in a conversation: their names, what is typed for them, and how they are shown."""

from collections.abc import Mapping
from dataclasses import fields
from types import NoneType, UnionType
from typing import Union, get_args, get_origin

from ostro.cli.parser import did_you_mean
from ostro.errors import BadRequest
from ostro.sampling_params import PARAMETERS, SamplingParams

UNSET = "default"
_KINDS = {each.name: each.type for each in fields(SamplingParams)}
# A conversation continues with one answer.
_NAMES = tuple(name for name, each in PARAMETERS.items() if each.is_option and name != "n")
_FLAGS: Mapping[str, bool] = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}
# Where neither the user nor the model says anything.
_OTHERWISE: Mapping[str, str] = {"max_tokens": "what fits", "seed": "random", "truncate_prompt_tokens": "off"}


def parameter_name(name: str) -> str:
    """As requests have it: the option's spelling is understood, too."""
    found = name.removeprefix("--").replace("-", "_")
    if found not in _NAMES:
        meant = did_you_mean(found, _NAMES, " ")
        raise BadRequest(f"{name} is not a sampling parameter.{meant} /set lists them.")
    return found


def parameter_value(name: str, text: str) -> object:
    """Raises BadRequest for text that is no value of this parameter."""
    name = parameter_name(name)
    value = _read(name, text)
    if name != "min_tokens":
        # That is limited by max_tokens, about which the server knows more.
        SamplingParams().with_changes(**{name: tuple(value) if isinstance(value, list) else value})
    return value


def parameters(given: Mapping[str, object], defaults: Mapping[str, object]) -> dict[str, str]:
    """Each parameter as it is shown: what was given, or what applies."""
    return {name: _shown(given[name]) if name in given else _default(name, defaults) for name in _NAMES}


def _read(name: str, text: str) -> object:
    kind = _kind(name)
    if kind is bool:
        if text.lower() not in _FLAGS:
            raise BadRequest(f"{name} is on or off, not {text}.")
        return _FLAGS[text.lower()]
    if kind not in (int, float):
        return [text]
    try:
        return kind(text)
    except ValueError:
        what = "an integer" if kind is int else "a number"
        raise BadRequest(f"{name} takes {what}, not {text}. /set {name} {UNSET} takes it back.") from None


def _kind(name: str) -> object:
    kind = _KINDS[name]
    if get_origin(kind) in (Union, UnionType):
        return next(each for each in get_args(kind) if each is not NoneType)
    return kind


def _default(name: str, defaults: Mapping[str, object]) -> str:
    if name in defaults:
        return f"{_shown(defaults[name])} (the model's own)"
    if name in _OTHERWISE:
        return f"{_OTHERWISE[name]} ({UNSET})"
    return f"{_shown(getattr(SamplingParams(), name))} ({UNSET})"


def _shown(value: object) -> str:
    match value:
        case bool():
            return "on" if value else "off"
        case float():
            return f"{value:g}"
        case list() | tuple():
            return ", ".join(repr(each) for each in value) or "none"
    return str(value)
