"""The `ostro` command: one file per subcommand. A subcommand is imported only when it is called."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from ostro.cli.parser import CommandParser, describe
from ostro.errors import NO_ROOM, BadRequest, OstroError, Unsupported
from ostro.system.env_file import read_cache_variables
from ostro.system.requirements import check_platform

WRONG_USAGE = 2
"""The exit status of argparse, too."""

COMMANDS = {
    "serve": "serve models over an OpenAI-compatible HTTP API",
    "chat": "chat with a model in the terminal",
    "launch": "start a coding agent, such as Codex or Claude Code, against a server",
    "ps": "list your servers on this machine: models, memory, address, uptime",
    "stop": "end a server, after the requests that it is answering",
    "generate": "complete a prompt or a file of prompts",
    "batch": "run a file of requests in OpenAI's batch format, offline",
    "bench": "load-test a server: latency and throughput",
    "simulate": "predict latency and throughput of servers, up to thousands, from measured costs",
    "compare": "send the same prompts to two servers or models and compare outputs and speed",
    "score": "score how likely a model is to continue each prompt with a given text",
    "models": "list, download, delete and verify models in the local cache",
    "recipe": "print the command for a popular model on a named device, and what to expect",
    "plan": "estimate how much memory a model needs and what fits, without loading it",
    "collect-env": "describe this machine and installation, for a bug report",
    "completion": "print a script that completes commands and model names in your shell",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. The exit status is 0, 1 for a reported failure, or 2 for wrong usage (`_is_usage`).

    Without a command it prints the help and succeeds, like pip, docker and gh.
    """
    try:
        given = sys.argv[1:] if argv is None else argv
        # Before the command is imported: the import itself could fail with a bare Python error.
        check_platform(_command(given))
        words = _translated(given)
        parser = _parser(words)
        args = parser.parse_args(words)
        if not words:
            parser.print_help()
            return 0
        read_cache_variables()
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except OstroError as error:
        print(f"ostro: {error}", file=sys.stderr)
        return WRONG_USAGE if _is_usage(error) else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Nobody reads our output any more.
        _drop_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        _drop_output()
        place = error.filename or "the output"
        print(f"ostro: No space left to write {place}. Free some, or choose another location.", file=sys.stderr)
        return 1


def _is_usage(error: OstroError) -> bool:
    """Whether an option, a setting or an input must change, rather than this build or machine."""
    return isinstance(error, BadRequest) and not isinstance(error, Unsupported)


def module_of(command: str) -> str:
    return f"ostro.cli.{command.replace('-', '_')}"


def _drop_output() -> None:
    """Python would complain again when it flushes stdout at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _command(words: Sequence[str]) -> str | None:
    return next((word for word in words if not word.startswith("-")), None)


def _translated(words: Sequence[str]) -> list[str]:
    """Rewrites another program's flags as ours, for commands that accept them, and what is meant for another one."""
    match list(words):
        case ["serve", *rest]:
            from ostro.cli import serve

            return ["serve", *serve.translate(rest)]
        case ["launch", *rest]:
            from ostro.cli import launch

            return ["launch", *launch.translate(rest)]
    return list(words)


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    from ostro.version import __version__

    parser = CommandParser(prog="ostro", description="An inference server for language models.")
    describe(
        parser,
        {
            "ostro serve": "the default model, at http://127.0.0.1:8000",
            "ostro serve Qwen/Qwen3-0.6B --ui": "a model from the Hugging Face Hub, with a playground",
            "ostro chat": "chat with it in this terminal",
            "ostro models available": "models that have a short name",
        },
        "Run `ostro COMMAND --help` for a command's options.",
    )
    parser.add_argument("--version", action="version", version=f"ostro {__version__}", help="print the version")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=bool(argv))
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        # Only the command being run needs its arguments.
        if name == _command(argv):
            module = import_module(module_of(name))
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser
