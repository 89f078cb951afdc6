"""Options shared by several commands: engine settings and sampling parameters."""

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from ostro.cli.files import read_text
from ostro.config import (
    KINDS,
    SETTINGS,
    CpuExperts,
    EngineConfig,
    Number,
    Size,
    read_cpu_experts,
    read_number,
    read_size,
)
from ostro.errors import BadRequest
from ostro.sampling_params import PARAMETERS, SamplingParams

# Longer lists of choices go into the help text, which is wrapped.
_LONGEST_METAVAR = 50


def memory_size(text: str) -> int:
    """`read_size`, with argparse's error."""
    try:
        return read_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def number_or_auto(text: str) -> Number:
    """`read_number`, with argparse's error."""
    try:
        return read_number(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def layers_on_cpu(text: str) -> CpuExperts:
    """`read_cpu_experts`, with argparse's error."""
    try:
        return read_cpu_experts(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


_READERS: Mapping[Any, Callable[[str], object]] = {
    int: int,
    float: float,
    Size: memory_size,
    Number: number_or_auto,
    CpuExperts: layers_on_cpu,
}


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    _add_engine_options(parser.add_argument_group("engine"), [name for name in SETTINGS if SETTINGS[name].in_commands])


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Engine options that affect memory use."""
    group = parser.add_argument_group("engine", "As for serve and generate.")
    _add_engine_options(group, [name for name in SETTINGS if SETTINGS[name].in_plan])


def _add_engine_options(group: argparse._ArgumentGroup, names: Iterable[str]) -> None:
    for name in names:
        kind, setting = KINDS[name], SETTINGS[name]
        metavar, text = metavar_and_help(kind, setting.metavar, setting.meaning, setting.default)
        flags = [flag_of(each) for each in (name, *setting.names.also)]
        if kind is bool:
            group.add_argument(*flags, action=argparse.BooleanOptionalAction, help=text)
        elif get_origin(kind) is Literal:
            group.add_argument(*flags, dest=name, choices=get_args(kind), metavar=metavar, help=text)
        else:
            read = next((_READERS[each] for each in (kind, *get_args(kind)) if each in _READERS), str)
            group.add_argument(*flags, dest=name, type=read, metavar=metavar, help=text)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Built from those options of the command that were given."""
    return EngineConfig(**{name: value for name, value in vars(args).items() if name in SETTINGS and value is not None})


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def metavar_and_help(hint: object, metavar: str | None, meaning: str, default: object) -> tuple[str, str]:
    """Metavar and help of an option of this type. The help includes the default, unless `meaning` states it."""
    text = meaning if "(default: " in meaning else meaning + _default(default, is_size=_metavar(hint) == "SIZE")
    # argparse interprets per cent signs.
    text = text.replace("%", "%%")
    metavar = metavar or _metavar(hint)
    if len(metavar) > _LONGEST_METAVAR:
        return "NAME", f"{text}; one of {metavar.replace('|', ', ')}"
    return metavar, text


def _metavar(hint: object) -> str:
    """The metavar for a type."""
    if get_origin(hint) is Annotated:
        kind, *marks = get_args(hint)
        return "SIZE" if "bytes" in marks else _metavar(kind)
    if get_origin(hint) is Literal:
        return "|".join(get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return _metavar(next(each for each in get_args(hint) if each is not NoneType))
    return {int: "N", float: "X", Path: "FILE"}.get(hint, "TEXT")  # type: ignore[call-overload, no-any-return]


def _default(value: object, *, is_size: bool) -> str:
    match value:
        case None | ():
            return ""
        case bool():
            return f" (default: {'on' if value else 'off'})"
        case int() if is_size:
            return f" (default: {value >> 20}M)"
        case float():
            return f" (default: {value:g})"
        case tuple():
            return f" (default: {','.join(str(each) for each in value)})"
        case _:
            return f" (default: {value})"


# The commands' sampling options, by name. Omitted ones take the command's or the model's default.
_SAMPLING = {each.name: each.type for each in fields(SamplingParams) if each.name in PARAMETERS}
_SAMPLING = {name: kind for name, kind in _SAMPLING.items() if PARAMETERS[name].is_option}


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for name, kind in _SAMPLING.items():
        flag, text = f"--{name.replace('_', '-')}", PARAMETERS[name].meaning.replace("%", "%%")
        if kind is bool:
            group.add_argument(flag, action="store_true", help=text)
        elif kind == tuple[str, ...]:
            group.add_argument(flag, action="append", default=[], metavar="TEXT", help=f"{text}; repeatable")
        elif kind is float:
            group.add_argument(flag, type=float, metavar="X", help=text)
        else:
            group.add_argument(flag, type=int, metavar="N", help=text)


def add_structured_options(parser: argparse.ArgumentParser) -> None:
    """Options for structured outputs. See `structured_fields`."""
    group = parser.add_argument_group("structured output")
    group.add_argument("--json", action="store_true", help="answer with a JSON object")
    group.add_argument(
        "--json-schema", metavar="FILE", help="answer with JSON that matches this schema: a file, or the schema itself"
    )
    group.add_argument(
        "--lenient",
        action="store_true",
        help="ignore the parts of the schema that cannot be enforced, instead of refusing it",
    )
    group.add_argument("--regex", metavar="TEXT", help="answer with text that this regular expression matches")
    group.add_argument("--choice", action="append", metavar="TEXT", help="answer with one of these texts; repeatable")
    group.add_argument(
        "--grammar", metavar="FILE", help="answer with text that matches this grammar, in GBNF or in Lark's notation"
    )
    group.add_argument(
        "--jump-forward", action="store_true", help="append the only possible tokens without sampling them"
    )


def structured_fields(args: argparse.Namespace) -> dict[str, object]:
    """Request fields for the options of `add_structured_options`. Raises BadRequest for a file that cannot be read."""
    given: dict[str, object] = {}
    if args.json:
        given["response_format"] = {"type": "json_object"}
    if args.json_schema is not None:
        schema = args.json_schema if args.json_schema.lstrip().startswith("{") else read_text(Path(args.json_schema))
        given["structured_outputs"] = {"json": schema, "strict": not args.lenient}
    elif args.lenient:
        raise BadRequest("--lenient is for --json-schema: leave it out.")
    if args.regex is not None:
        given["regex"] = args.regex
    if args.choice is not None:
        given["guided_choice"] = args.choice
    if args.grammar is not None:
        given["grammar"] = read_text(Path(args.grammar))
    if args.jump_forward:
        given["jump_forward"] = True
    return given


def sampling_params(args: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    given = {name: getattr(args, name) for name in _SAMPLING}
    return defaults.with_changes(**{name: value for name, value in given.items() if value is not None})
