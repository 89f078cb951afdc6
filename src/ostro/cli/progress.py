"""What takes long before a model runs in this process, told on a terminal: downloads, weights that are packed."""

import logging
import sys


def tell_progress() -> None:
    """From now on our log lines are shown, where somebody watches; elsewhere standard error is for errors alone."""
    if sys.stderr.isatty():
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        logging.getLogger("ostro").setLevel(logging.INFO)
