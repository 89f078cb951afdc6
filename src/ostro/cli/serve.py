"""ostro serve: the OpenAI API over models. Its options are the fields of `server.settings`, one flag each."""

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ostro.cli.draccus import Flags, translated
from ostro.errors import BadRequest
from ostro.server.settings import (
    ALIASES,
    ONLY_IN_FILES,
    REFUSED,
    REPEATABLE,
    Given,
    Names,
    ServeSettings,
    read_settings,
)


class _Once(argparse.Action):
    """Keeps a value and the flag it came with; a second one for the same setting is an error, by whatever name."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if option_string is None and values is None:
            # What argparse does for a positional that was not given.
            return
        flag = option_string or "MODEL"
        given: Given | None = getattr(namespace, self.dest, None)
        if given is not None:
            raise argparse.ArgumentError(None, f"{flag} says again what {given.origin} has said: give one of the two")
        setattr(namespace, self.dest, Given(self._value(flag, values), flag))

    def _value(self, flag: str, values: object) -> object:
        return values


class _Many(argparse.Action):
    """Gathers the values of a flag that may be given several times."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if values is None:
            # What argparse does for a positional that was not given.
            return
        flag = option_string or "MODEL"
        given: Given | None = getattr(namespace, self.dest, None)
        before = given.value if given is not None and isinstance(given.value, tuple) else ()
        # What is not named by a flag comes first, wherever it stands: it is the model that answers by default.
        gathered = (values, *before) if option_string is None else (*before, values)
        setattr(namespace, self.dest, Given(gathered, flag if given is None else f"{given.origin}, {flag}"))


class _Switch(_Once):
    """--name and --no-name."""

    def _value(self, flag: str, values: object) -> object:
        return not flag.startswith("--no-")


class _Refused(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        raise BadRequest(f"{option_string} cannot be honoured: {REFUSED[self.dest]}")


def translate(words: Sequence[str]) -> list[str]:
    """A command line in the style of Levanter's, in ours."""
    valued, switches = {"--config", "--config-path"}, {"--print-config", "--dry-run"}
    for name, field in ServeSettings.model_fields.items():
        known = _flags(name, is_switch=field.annotation is bool)
        (switches if field.annotation is bool else valued).update(known)
    return translated(words, Flags(valued | {_flag(name) for name in REFUSED}, switches))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", action=_Many, help="the same as --model")
    parser.add_argument("--config", "--config-path", type=Path, metavar="FILE", help="a YAML file of settings")
    parser.add_argument(
        "--print-config", action="store_true", help="print the settings, their origins and what will run, and exit"
    )
    parser.add_argument("--dry-run", action="store_true", help="load and warm up, report memory and limits, and exit")
    group = parser.add_argument_group("settings", "Also as OSTRO_… variables and as keys of the config file.")
    for name, field in ServeSettings.model_fields.items():
        if name in ONLY_IN_FILES:
            continue
        _add_setting(group, name, field.annotation is bool, f"{field.description}{_default(field.default)}")
    for name in REFUSED:
        parser.add_argument(_flag(name), nargs="?", dest=name, action=_Refused, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    given = {name: value for name in ServeSettings.model_fields if (value := _given(args, name)) is not None}
    merged = read_settings(given, config=args.config)
    if args.print_config:
        print(merged.describe(), *(f"# {note}\n" for note in merged.notes), sep="", end="", flush=True)
    # Not above: what has to do with serving takes a while to import, and a wrong setting should not.
    from ostro.server.fleet import outlook
    from ostro.server.lifecycle import rehearse, serve

    if args.print_config:
        print("# What will run:", *(f"# {line}" for line in outlook(merged.settings)), sep="\n")
        return 0
    if args.dry_run:
        print(asyncio.run(rehearse(merged.settings)), end="")
        return 0
    return serve(merged)


def _given(args: argparse.Namespace, name: str) -> Given | None:
    value = getattr(args, name, None)
    assert value is None or isinstance(value, Given)
    return value


def _add_setting(group: argparse._ArgumentGroup, name: str, is_switch: bool, text: str) -> None:
    flags = _flags(name, is_switch=is_switch)
    text = text.replace("%", "%%")
    if is_switch:
        group.add_argument(*flags, dest=name, nargs=0, action=_Switch, help=text)
    else:
        action = _Many if name in REPEATABLE else _Once
        group.add_argument(*flags, dest=name, action=action, metavar="X", help=text)


def _flags(name: str, *, is_switch: bool) -> list[str]:
    """All that set a setting."""
    flags = [_flag(name), *ALIASES.get(name, Names()).flags]
    return flags + [f"--no-{flag[2:]}" for flag in flags if is_switch and not flag.startswith("--disable-")]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _default(value: object) -> str:
    match value:
        case None | ():
            return ""
        case bool():
            return f" (default: {'on' if value else 'off'})"
        case tuple():
            return f" (default: {','.join(str(each) for each in value)})"
        case _:
            return f" (default: {value})"
