"""The `ostro` command: one file a subcommand. A subcommand's imports wait until it is called."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from ostro.cli.parser import CommandParser, describe
from ostro.env_file import read_cache_variables
from ostro.errors import OstroError
from ostro.platforms import check_platform

COMMANDS = {
    "serve": "serve a model over HTTP, as OpenAI's API",
    "chat": "talk with a model in the terminal",
    "generate": "complete a prompt or a file of prompts",
    "batch": "run a file of requests in OpenAI's batch format",
    "bench": "put load on a server and measure latencies and throughput",
    "compare": "ask two servers or models the same and put their answers and speed side by side",
    "score": "say how likely a model is to continue prompts in given ways",
    "models": "list, fetch, delete and check the models in the local cache",
    "plan": "say how much memory a model needs and what fits, without loading it",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit status is 0, 1 for a failure that was reported, 2 for wrong usage.

    Without a command it prints the help, which is no failure: so do pip, docker and gh.
    """
    try:
        given = sys.argv[1:] if argv is None else argv
        # Before anything of a command is imported: that would fail in words of Python's own.
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
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Whoever read our output has gone; Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _command(words: Sequence[str]) -> str | None:
    return next((word for word in words if not word.startswith("-")), None)


def _translated(words: Sequence[str]) -> list[str]:
    """In our own flags, where a command understands those of others."""
    if not words or words[0] != "serve":
        return list(words)
    from ostro.cli.serve import translate

    return [words[0], *translate(words[1:])]


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    from ostro.version import __version__

    parser = CommandParser(prog="ostro", description="Serves language models.")
    describe(
        parser,
        {
            "ostro serve": "the embedded model, at http://127.0.0.1:8000",
            "ostro serve Qwen/Qwen3-0.6B --ui": "one of the Hugging Face Hub, with a page to try it",
            "ostro chat": "talk with it in this terminal",
            "ostro models available": "models that have a short name",
        },
        "ostro COMMAND --help says more of each.",
    )
    parser.add_argument("--version", action="version", version=f"ostro {__version__}", help="print the version")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=bool(argv))
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        # Only the command that is called needs its arguments.
        if name == _command(argv):
            module = import_module(f"ostro.cli.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser
