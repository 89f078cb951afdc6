"""Shows slow startup work of a model in this process on a terminal: downloads, packing weights."""

import logging
import sys


def tell_progress() -> None:
    """Shows our log lines on a terminal; otherwise standard error is reserved for errors."""
    if sys.stderr.isatty():
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        logging.getLogger("ostro").setLevel(logging.INFO)
