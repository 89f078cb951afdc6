"""ostro serve: models over an OpenAI-compatible API. Its options are the fields of `server.settings`, one flag each."""

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

from ostro.cli.draccus import Flags, translated
from ostro.cli.options import flag_of, metavar_and_help
from ostro.cli.parser import add_short_help, describe
from ostro.config import SETTINGS, Names
from ostro.errors import BadRequest
from ostro.server.settings import (
    ALIASES,
    ENGINE_SETTINGS,
    GROUPS,
    ONLY_IN_FILES,
    REFUSED,
    REPEATABLE,
    Given,
    Merged,
    ServeSettings,
    read_settings,
)

# Metavars of the server's own settings whose type does not suggest one.
_METAVARS = {
    "model": "[NAME=]REF",
    "checkpoint_path": "DIR",
    "levanter_config": "FILE",
    "models": "PLACE",
    "lora": "NAME=DIR",
    "pin": "NAME,…",
    "gcs_bucket": "BUCKET",
    "gcs_model_prefix": "PREFIX",
    "served_model_name": "NAME,…",
    "model_alias": "NAME=MODEL,…",
    "host": "ADDRESS",
    "port": "PORT",
    "cors_origins": "ORIGIN,…",
    "api_key": "KEY,…",
    "priority_key": "KEY,…",
    "admin_key": "KEY,…",
    "otlp_endpoint": "URL",
    "profile": "DIR",
}

# What most people need. `--help` shows these settings, `--help-all` shows all.
_ESSENTIAL = (
    *("model", "config", "print_config", "dry_run", "models"),
    *("max_seq_len", "kv_memory", "max_batch_seqs", "device", "dtype", "quantize"),
    *("host", "port", "ui", "api_key", "log_level"),
)

_AIOS_COMMAND = "hrm"


class _Once(argparse.Action):
    """Stores a value and its flag; a second value for the same setting is an error, under any of its names."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if option_string is None and values is None:
            # argparse calls it also for an omitted positional.
            return
        flag = option_string or "MODEL"
        given: Given | None = getattr(namespace, self.dest, None)
        if given is not None:
            raise argparse.ArgumentError(
                None, f"{flag} sets what {given.origin} has already set: give only one of them"
            )
        setattr(namespace, self.dest, Given(self._value(flag, values), flag))

    def _value(self, flag: str, values: object) -> object:
        return values


class _Many(argparse.Action):
    """Collects the values of a repeatable flag."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if values is None:
            # argparse calls it also for an omitted positional.
            return
        flag = option_string or "MODEL"
        given: Given | None = getattr(namespace, self.dest, None)
        before = given.value if given is not None and isinstance(given.value, tuple) else ()
        # The positional argument always comes first: it is the default model.
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
        raise BadRequest(f"{option_string} is not supported: {REFUSED[self.dest]}")


def translate(words: Sequence[str]) -> list[str]:
    """A Levanter-style command line, translated to our flags; AI-OS's `serve hrm` means `serve`."""
    valued, switches = {"--config", "--config-path"}, {"--print-config", "--dry-run"}
    for name, field in ServeSettings.model_fields.items():
        known = _flags(name, is_switch=field.annotation is bool)
        (switches if field.annotation is bool else valued).update(known)
    if len(words) > 1 and words[0] == _AIOS_COMMAND and not Path(_AIOS_COMMAND).exists():
        words = words[1:]
    return translated(words, Flags(valued | {flag_of(name) for name in REFUSED}, switches))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_short_help(parser, _ESSENTIAL)
    parser.add_argument("model", nargs="?", metavar="MODEL", action=_Many, help="the same as --model")
    parser.add_argument("--config", "--config-path", type=Path, metavar="FILE", help="read settings from a YAML file")
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the settings, where each comes from and what will run, then exit",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="load and warm up the model, report memory and limits, then exit"
    )
    _add_settings(parser)
    describe(
        parser,
        {
            "ostro serve": "the default model",
            "ostro serve Qwen/Qwen3-0.6B --port 9000 --ui": "a model from the Hugging Face Hub, with a playground",
            "ostro serve ./model.gguf --host 0.0.0.0 --api-key KEY": "a local file, reachable from other machines",
            "ostro serve --models ./models --memory-budget 12G": "every model in a directory, loaded on demand",
            "ostro serve --config ostro.yaml --print-config": "show the settings and where each comes from",
        },
        "`ostro serve --help-all` shows all settings. Every setting --some-name can also be set as OSTRO_SOME_NAME in "
        "the environment or a .env file, and as some_name in the config file. The command line overrides the "
        "environment, which overrides .env, which overrides the config file. See docs/configuration.md for details.",
    )
    for name in REFUSED:
        parser.add_argument(flag_of(name), nargs="?", dest=name, action=_Refused, help=argparse.SUPPRESS)


def merged_settings(args: argparse.Namespace) -> Merged:
    """Merges the command line, the environment, `.env` and the config file."""
    given = {name: value for name in ServeSettings.model_fields if (value := _given(args, name)) is not None}
    return read_settings(given, config=args.config)


def run(args: argparse.Namespace) -> int:
    merged = merged_settings(args)
    if args.print_config:
        print(merged.describe(), *(f"# {note}\n" for note in merged.notes), sep="", end="", flush=True)
    # Imported late: the server's modules are slow to import, and a wrong setting should be reported at once.
    from ostro.server.lifecycle import rehearse, serve
    from ostro.server.models.build import outlook

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


def _add_settings(parser: argparse.ArgumentParser) -> None:
    hints = get_type_hints(ServeSettings, include_extras=True)
    group: argparse._ArgumentGroup | None = None
    for name, field in ServeSettings.model_fields.items():
        if name in GROUPS:
            group = parser.add_argument_group(GROUPS[name].lower().replace("hrm", "HRM"))
        assert group is not None, "the first setting begins a group"
        if name in ONLY_IN_FILES:
            continue
        is_switch = field.annotation is bool
        flags = _flags(name, is_switch=is_switch)
        metavar, text = metavar_and_help(hints[name], _metavar(name), str(field.description), field.default)
        if is_switch:
            group.add_argument(*flags, dest=name, nargs=0, action=_Switch, help=text)
        else:
            action = _Many if name in REPEATABLE else _Once
            group.add_argument(*flags, dest=name, action=action, metavar=metavar, help=text)


def _metavar(name: str) -> str | None:
    """The metavar of a setting whose type does not suggest one."""
    if name in ENGINE_SETTINGS:
        return SETTINGS[name].metavar
    return "SECONDS" if name.endswith("_timeout") else _METAVARS.get(name)


def _flags(name: str, *, is_switch: bool) -> list[str]:
    """All flags for a setting."""
    flags = [flag_of(name), *ALIASES.get(name, Names()).flags]
    return flags + [f"--no-{flag[2:]}" for flag in flags if is_switch and not flag.startswith("--disable-")]
