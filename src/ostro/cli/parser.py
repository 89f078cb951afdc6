"""The argument parser of all commands: readable help, and suggestions for mistakes. Knows argparse, no command."""

import argparse
import difflib
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

_HELP_COLUMN = 30
# For a command with its description, on a terminal of the usual width.
_EXAMPLE_WIDTH = 74
_NO = "--no-"


class CommandParser(argparse.ArgumentParser):
    """Allows no abbreviations, and suggests corrections for mistyped options and values."""

    essential: Collection[str] = ()
    """What the help shows; everything if empty. See `add_short_help`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": HelpFormatter, **kwargs})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Rejects unknown arguments itself: a command's parser knows best what was meant, not the main one."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._meant(unknown)}")
        return known, unknown

    def format_usage(self) -> str:
        self.usage = self.usage or self._short_usage()
        return super().format_usage()

    def format_help(self) -> str:
        self.usage = self.usage or self._short_usage()
        if not self.essential:
            return super().format_help()
        formatter = _ShortHelpFormatter(self.prog)
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for group in self._action_groups:
            formatter.start_section(group.title)
            formatter.add_arguments([each for each in group._group_actions if each.dest in self.essential])
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def format_whole_help(self) -> str:
        self.usage = self.usage or self._short_usage()
        return super().format_help()

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(each) for each in action.choices]
            told = f"{value!r} is not one of {', '.join(choices)}{did_you_mean(str(value), choices, '. ')}"
            raise argparse.ArgumentError(action, told)

    def _meant(self, unknown: Iterable[str]) -> str:
        flags = [flag for flag, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS]
        given = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        return next(filter(None, (did_you_mean(flag, flags, ". ") for flag in given)), "")

    def _short_usage(self) -> str:
        """Required arguments, and a hint at the options, which the help lists."""
        actions = [action for action in self._actions if action.help != argparse.SUPPRESS]
        options = [action for action in actions if action.option_strings]
        needed = [f"{each.option_strings[0]} {each.metavar}" for each in options if each.required]
        places = [_place(each) for each in actions if not each.option_strings]
        optional = [] if self._subparsers is not None else ["[options]"]
        return " ".join([self.prog, *needed, *places, *optional]).replace("%", "%%")


class _WholeHelp(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, CommandParser)
        print(parser.format_whole_help(), end="")
        parser.exit()


def add_short_help(parser: argparse.ArgumentParser, essential: Collection[str]) -> None:
    """Lets `--help` show only these arguments, for a command with many, and `--help-all` show them all."""
    assert isinstance(parser, CommandParser)
    parser.add_argument("--help-all", nargs=0, action=_WholeHelp, help="show all options and exit")
    parser.essential = {"help", "help_all", *essential}


class HelpFormatter(argparse.HelpFormatter):
    """Shows one name per option, with its aliases after the description. Keeps indented lines of an epilog, which are
    examples.
    """

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=_HELP_COLUMN)

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        # argparse overlooks that subcommands are indented once more.
        for each in self._iter_indented_subactions(action):
            width = len(self._format_action_invocation(each)) + self._current_indent
            self._action_max_length = max(self._action_max_length, width)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        [*short, name] = _shown_flags(action)
        value = "" if action.nargs == 0 else f" {self._format_args(action, action.dest.upper())}"
        return ", ".join([*short, name]) + value

    def _expand_help(self, action: argparse.Action) -> str:
        text = super()._expand_help(action)
        others = _other_flags(action)
        return f"{text} (also {', '.join(others)})" if others else text

    def _split_lines(self, text: str, width: int) -> list[str]:
        # Does not break option names at hyphens.
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = [
            each if each.startswith("  ") or "\n  " in each else textwrap.fill(" ".join(each.split()), width)
            for each in text.split("\n\n")
        ]
        return textwrap.indent("\n\n".join(paragraphs), indent)


class _ShortHelpFormatter(HelpFormatter):
    """Leaves out aliases."""

    def _expand_help(self, action: argparse.Action) -> str:
        return argparse.HelpFormatter._expand_help(self, action)


def describe(parser: argparse.ArgumentParser, examples: Mapping[str, str], note: str = "") -> None:
    """Adds an epilog to a command's help: example commands with descriptions, and a note."""
    width = max(len(command) for command in examples)
    fits = width + max(len(text) for text in examples.values()) <= _EXAMPLE_WIDTH
    between = "  # " if fits else "\n      "
    lines = [f"  {command:<{width if fits else 0}}{between}{text}" for command, text in examples.items()]
    parser.epilog = "\n".join(["examples:", *lines]) + (f"\n\n{note}" if note else "")


def did_you_mean(given: str, known: Iterable[str], before: str = "") -> str:
    """A "Did you mean …?" question if something known is similar; otherwise empty."""
    close = difflib.get_close_matches(given, list(known), 1)
    return f"{before}Did you mean {close[0]}?" if close else ""


def _shown_flags(action: argparse.Action) -> list[str]:
    """Short flags and the first long one; a switch is combined with its opposite."""
    long = [flag for flag in action.option_strings if flag.startswith("--")]
    short = [flag for flag in action.option_strings if not flag.startswith("--")]
    name = long[0]
    return [*short, f"--[no-]{name[2:]}" if _NO + name[2:] in long else name]


def _other_flags(action: argparse.Action) -> list[str]:
    long = [flag for flag in action.option_strings if flag.startswith("--")]
    return [flag for flag in long[1:] if not (flag.startswith(_NO) and f"--{flag[5:]}" in long)]


def _place(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest)
    match action.nargs:
        case "?":
            return f"[{name}]"
        case "*":
            return f"[{name} ...]"
        case "+":
            return f"{name} ..."
    if isinstance(action, argparse._SubParsersAction):
        return f"{name} ..."
    return name
