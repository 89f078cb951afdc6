"""For commands that run a model in this process: startup progress on a terminal, and --profile DIR."""

import argparse
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ostro.engine.profile import MOST_STEPS

if TYPE_CHECKING:
    from ostro.llm import LLM


def tell_progress() -> None:
    """Shows our log lines on a terminal, such as those about downloads and packed weights; otherwise standard error is
    reserved for errors.
    """
    if sys.stderr.isatty():
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        logging.getLogger("ostro").setLevel(logging.INFO)


def add_profile_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="DIR",
        help=f"write a trace of the first {MOST_STEPS} engine steps to a file in this directory, for ui.perfetto.dev",
    )


@contextmanager
def profiled(llm: "LLM", args: argparse.Namespace) -> Iterator[None]:
    """Profiles the block if the option is given."""
    if args.profile is None:
        yield
        return
    with llm.profile(args.profile) as path:
        yield
    print(f"profile: {path}", file=sys.stderr)
