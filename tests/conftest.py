"""Hypothesis profiles. `default` explores anew each run; `ci` repeats the same examples, so a red build stays red."""

import os

from hypothesis import settings

# Two loaded cores make any time limit on a single example a source of false alarms.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")
