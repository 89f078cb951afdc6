"""Lets parity tests use the dense attention oracle that lives beside the model tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
