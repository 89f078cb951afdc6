"""--profile DIR: a trace of what a command's engine did."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ostro.engine.profile import MOST_STEPS
from ostro.llm import LLM


def add_profile_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="DIR",
        help=f"write a trace of the first {MOST_STEPS} engine steps to a file in this directory, for ui.perfetto.dev",
    )


@contextmanager
def profiled(llm: LLM, args: argparse.Namespace) -> Iterator[None]:
    """Profiles the block if the option is given."""
    if args.profile is None:
        yield
        return
    with llm.profile(args.profile) as path:
        yield
    print(f"profile: {path}", file=sys.stderr)
