"""An environment in which Python processes cannot import torch, as where it is not installed."""

import os
from pathlib import Path

BLOCKER = """
import sys


class _NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith("torch."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


sys.meta_path.insert(0, _NoTorch())
"""


def without_torch(directory: Path) -> dict[str, str]:
    """Variables for such processes, and for their children."""
    blocker = directory / "no-torch"
    blocker.mkdir(exist_ok=True)
    (blocker / "sitecustomize.py").write_text(BLOCKER)
    paths = [str(blocker), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}
