"""ostro completion: scripts that complete commands, options and model names in bash, zsh and fish.

A script holds all words, so that completing costs no start of Python; only names of models and servers are asked for,
by `ostro completion models`. bash and zsh share the tables of words, which are functions of plain shell.
"""

import argparse
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

from ostro.cli import COMMANDS, module_of
from ostro.cli.parser import CommandParser, describe
from ostro.recipes import recipe_names

Kind = Literal["choices", "files", "models", "cached", "servers", "anything"]

_FILES = ("FILE", "DIR", "PLACE")
_MODELS = ("MODEL", "REF", "[NAME=]REF")
_RECIPE = "RECIPE"
_CACHED = ("models rm", "models verify")
_SERVERS = ("stop",)
_CHOICES = re.compile(r"[a-z0-9_]+(\|[a-z0-9_]+)+(\|FILE)?")


@dataclass(frozen=True)
class Values:
    """What may follow an option, or stand without one."""

    kind: Kind
    choices: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        """In the tables: the choices, or the kind after an @."""
        return " ".join(self.choices) if self.kind == "choices" else f"@{self.kind}"


@dataclass(frozen=True)
class Option:
    flags: tuple[str, ...]
    """Those that the help shows."""
    aliases: tuple[str, ...]
    values: Values | None
    """None for a switch."""
    help: str


@dataclass(frozen=True)
class Command:
    path: str
    """Its words after `ostro`, such as `models list`."""
    options: tuple[Option, ...]
    subcommands: Mapping[str, str]
    """With their summaries."""
    place: Values | None
    """Its positional arguments."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "wanted", metavar="bash|zsh|fish", choices=(*_SCRIPTS, *_NAMES), help="the shell that will read the script"
    )
    describe(
        parser,
        {
            "ostro completion bash": 'in ~/.bashrc: eval "$(ostro completion bash)"',
            "ostro completion zsh": 'in ~/.zshrc, after compinit: eval "$(ostro completion zsh)"',
            "ostro completion fish": "in ~/.config/fish/config.fish: ostro completion fish | source",
        },
    )


def run(args: argparse.Namespace) -> int:
    if args.wanted in _NAMES:
        print(*_NAMES[args.wanted](), sep="\n")
    else:
        print(_SCRIPTS[args.wanted](commands()), end="")
    return 0


# --- names of models and servers -------------------------------------------------------------------------------------


def _references() -> list[str]:
    """What can be given as a model without a path: short names, and models in our cache and the Hub's."""
    from ostro.sources.aliases import ALIASES
    from ostro.sources.store import ModelStore

    return sorted({*ALIASES, *(each.reference for each in ModelStore().entries()), *_hub_ids()})


def _cached() -> list[str]:
    """What `ostro models list` calls the entries of the cache."""
    from ostro.sources.page_files import kept_pages
    from ostro.sources.store import ModelStore

    store = ModelStore()
    return sorted({each.name for each in (*store.entries(), *store.packed(), *kept_pages(store))})


def _hub_ids() -> Iterator[str]:
    """From the names of directories: importing the Hub's client would take longer than anyone waits for a word."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    return (path.name.removeprefix("models--").replace("--", "/", 1) for path in cache.glob("models--*--*"))


def _servers() -> list[str]:
    """What `ostro stop` takes, but for process ids, which nobody remembers."""
    from ostro.cli.servers import running_servers

    return sorted({each for record in running_servers() for each in (record.url, *(m.name for m in record.models))})


_NAMES: Mapping[str, Callable[[], list[str]]] = {"models": _references, "cached": _cached, "servers": _servers}


# --- words of commands -----------------------------------------------------------------------------------------------


def commands() -> list[Command]:
    """All commands, the program itself first, as their parsers describe them."""
    found = [Command("", (_option("--help"), _option("--version")), COMMANDS, None)]
    for name in COMMANDS:
        parser = CommandParser(prog=f"ostro {name}")
        import_module(module_of(name)).add_arguments(parser)
        found += _described(name, parser)
    return found


def _option(flag: str) -> Option:
    return Option((flag,), (), None, "")


def _described(path: str, parser: argparse.ArgumentParser) -> Iterator[Command]:
    actions = [each for each in parser._actions if each.help != argparse.SUPPRESS]
    inner = next((each for each in actions if isinstance(each, argparse._SubParsersAction)), None)
    places = [each for each in actions if not each.option_strings and each is not inner]
    summaries = {} if inner is None else {each.dest: each.help or "" for each in inner._choices_actions}
    yield Command(
        path,
        tuple(_described_option(each) for each in actions if each.option_strings),
        summaries,
        _values(places[0], path) if places else None,
    )
    for name, subparser in ({} if inner is None else inner.choices).items():
        yield from _described(f"{path} {name}", subparser)


def _described_option(action: argparse.Action) -> Option:
    first = next(flag for flag in action.option_strings if flag.startswith("--"))
    shown = [flag for flag in action.option_strings if flag in (first, f"--no-{first[2:]}") or flag[1] != "-"]
    others = [flag for flag in action.option_strings if flag not in shown]
    values = None if action.nargs == 0 else _values(action)
    return Option(tuple(shown), tuple(others), values, (action.help or "").replace("%%", "%"))


def _values(action: argparse.Action, path: str = "") -> Values:
    metavar = str(action.metavar)
    if _CHOICES.fullmatch(metavar):
        return Values("choices", tuple(each for each in metavar.split("|") if each != "FILE"))
    if action.choices is not None:
        return Values("choices", tuple(map(str, action.choices)))
    if path in _CACHED:
        return Values("cached")
    if metavar == _RECIPE:
        return Values("choices", tuple(recipe_names()))
    if path in _SERVERS:
        return Values("servers")
    if metavar in _MODELS:
        return Values("models")
    return Values("files" if metavar in _FILES else "anything")


# --- bash and zsh ----------------------------------------------------------------------------------------------------

_TABLES = """\
# The words of command $1: its options and subcommands.
_ostro_words() {{
    case "$1" in
{words}
    esac
}}

# What follows option $2 of command $1; nothing for a switch.
_ostro_values() {{
    case "$1 $2" in
{values}
    esac
}}

# What stands without an option in command $1.
_ostro_place() {{
    case "$1" in
{places}
    esac
}}

# The command among these words, such as "models list".
_ostro_command() {{
    local at="" word
    for word in "$@"; do
        case "$at $word" in
            {paths}) at="${{at:+$at }}$word" ;;
        esac
    done
    echo "$at"
}}

# Candidates of a table's entry $1.
_ostro_candidates() {{
    case "$1" in
        @models | @cached | @servers) command ostro completion "${{1#@}}" 2>/dev/null ;;
        @*) ;;
        *) printf '%s\\n' "$1" | tr ' ' '\\n' ;;
    esac
}}
"""

_BASH = """\
_ostro() {
    local line="${COMP_LINE:0:COMP_POINT}" words at word before found prefix=""
    # Not COMP_WORDS, which splits references such as gs://bucket/model at colons.
    read -ra words <<<"$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    word="${words[${#words[@]} - 1]}"
    before="${words[${#words[@]} - 2]}"
    at="$(_ostro_command "${words[@]:1:${#words[@]}-2}")"
    if [[ $word == --*=* ]]; then
        before="${word%%=*}"
        word="${word#*=}"
    fi
    found="$(_ostro_values "$at" "$before")"
    if [[ -z $found && $word == -* ]]; then
        found="$(_ostro_words "$at")"
    elif [[ -z $found ]]; then
        found="$(_ostro_place "$at")"
        [[ -z $found ]] && found="$(_ostro_words "$at")"
    fi
    local IFS=$'\\n'
    COMPREPLY=($(compgen -W "$(_ostro_candidates "$found")" -- "$word"))
    case "$found" in
        @files | @models) compopt -o filenames 2>/dev/null; COMPREPLY+=($(compgen -f -- "$word")) ;;
    esac
    # bash replaces only what follows the last colon.
    [[ $COMP_WORDBREAKS == *:* ]] && prefix="${word%"${word##*:}"}"
    COMPREPLY=("${COMPREPLY[@]#"$prefix"}")
}
complete -F _ostro ostro
"""

_ZSH = """\
_ostro() {
    local at word="${words[CURRENT]}" before="${words[CURRENT-1]}" found
    at="$(_ostro_command "${(@)words[2,CURRENT-1]}")"
    if [[ $word == --*=* ]]; then
        before="${word%%=*}"
        compset -P '*='
        word="${word#*=}"
    fi
    found="$(_ostro_values "$at" "$before")"
    if [[ -z $found && $word == -* ]]; then
        found="$(_ostro_words "$at")"
    elif [[ -z $found ]]; then
        found="$(_ostro_place "$at")"
        [[ -z $found ]] && found="$(_ostro_words "$at")"
    fi
    compadd -- ${(f)"$(_ostro_candidates "$found")"}
    case "$found" in
        @files | @models) _files ;;
    esac
}
compdef _ostro ostro
"""


def bash(found: Iterable[Command]) -> str:
    return f"# Completion of ostro for bash.\n{_tables(list(found))}\n{_BASH}"


def zsh(found: Iterable[Command]) -> str:
    return f"#compdef ostro\n# Completion of ostro for zsh.\n{_tables(list(found))}\n{_ZSH}"


def _tables(found: list[Command]) -> str:
    paths = [each.path for each in found if each.path]
    parents = [tuple(path.rpartition(" ")[::2]) for path in paths]
    return _TABLES.format(
        words="\n".join(_entry([each.path], " ".join(_words(each))) for each in found),
        values="\n".join(
            _entry([f"{each.path} {flag}" for flag in flags], word) for each in found for flags, word in _valued(each)
        ),
        places="\n".join(_entry([each.path], each.place.word) for each in found if each.place is not None),
        paths=" | ".join(f'"{parent} {name}"' for parent, name in parents),
    )


def _entry(patterns: Iterable[str], words: str) -> str:
    return f"        {' | '.join(map(_quoted, patterns))}) echo {shlex.quote(words)} ;;"


def _quoted(text: str) -> str:
    return f'"{text}"'


def _words(command: Command) -> list[str]:
    return [*command.subcommands, *(flag for option in command.options for flag in option.flags)]


def _valued(command: Command) -> Iterator[tuple[tuple[str, ...], str]]:
    for option in command.options:
        if option.values is not None:
            yield (*option.flags, *option.aliases), option.values.word


# --- fish ------------------------------------------------------------------------------------------------------------

_FISH = """\
# Completion of ostro for fish.
function __ostro_at
    set -l at
    for word in (commandline -opc)[2..]
        set -l longer (string join -- ' ' $at $word)
        contains -- $longer {paths}; and set at $longer
    end
    test "$at" = "$argv"
end
complete -c ostro -f
"""


def fish(found: Iterable[Command]) -> str:
    found = list(found)
    head = _FISH.format(paths=" ".join(_in_fish(each.path) for each in found if each.path))
    return head + "".join(
        f"complete -c ostro -n {_in_fish(_condition(each))} {line}\n" for each in found for line in _lines(each)
    )


def _condition(command: Command) -> str:
    return f"__ostro_at {_in_fish(command.path)}"


def _lines(command: Command) -> Iterator[str]:
    for name, summary in command.subcommands.items():
        yield f"-a {name} -d {_in_fish(summary)}"
    for option in command.options:
        names = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags)
        yield f"{names}{_fish_values(option.values)} -d {_in_fish(_brief(option.help))}"
    if command.place is not None:
        yield _fish_values(command.place).replace(" -r", "").strip() or "-f"


def _fish_values(values: Values | None) -> str:
    match values:
        case None:
            return ""
        case Values("choices", choices):
            return f" -r -f -a {_in_fish(' '.join(choices))}"
        case Values("models" | "cached" | "servers" as kind):
            return f" -r {'-F' if kind == 'models' else '-f'} -a '(command ostro completion {kind} 2>/dev/null)'"
        case Values("files"):
            return " -r -F"
    return " -r -f"


def _brief(text: str) -> str:
    """The first clause of an option's help."""
    return re.split(r"[;:(,]", text, maxsplit=1)[0].strip()


def _in_fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_SCRIPTS: Mapping[str, Callable[[Iterable[Command]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
