"""What `pip install .` brings into an empty environment: how many megabytes of packages, in how many seconds.

    python bench/install_size.py [--extras torch] [--keep DIRECTORY] [--json]

Wheels come from pip's cache or the network, at the versions of constraints.txt. The exit status is 1 if packages take
more than `--most` megabytes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_MOST_MB = 250.0
_LISTED = 8
# What pip brings itself.
_TOOLS = ("pip", "setuptools")


@dataclass(frozen=True)
class Installed:
    seconds: float
    megabytes: float
    """Size of site-packages, without pip and byte code."""
    largest: dict[str, float]
    """The largest packages, in megabytes."""
    has_torch: bool


def installed(environment: Path, extras: str = "") -> Installed:
    """Makes an environment there and installs this checkout into it, as its users do with pip."""
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    target = f"{ROOT}[{extras}]" if extras else str(ROOT)
    started = time.monotonic()
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-compile", "-c", ROOT / "constraints.txt", target], check=True
    )
    seconds = time.monotonic() - started
    [site] = environment.glob("lib/python3*/site-packages")
    sizes = {path.name: _bytes_of(path) / 1e6 for path in site.iterdir() if not path.name.startswith(_TOOLS)}
    largest = sorted(sizes.items(), key=lambda each: -each[1])[:_LISTED]
    return Installed(
        seconds=round(seconds, 1),
        megabytes=round(sum(sizes.values()), 1),
        largest={name: round(size, 1) for name, size in largest},
        has_torch="torch" in sizes,
    )


def _bytes_of(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    files = (each for each in path.rglob("*") if each.is_file() and each.suffix != ".pyc")
    return sum(each.stat().st_size for each in files)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extras", default="", help="of pyproject.toml, separated by commas")
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="make the environment there, and leave it")
    parser.add_argument("--most", type=float, default=_MOST_MB, metavar="MB", help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = installed(args.keep or Path(scratch, "environment"), args.extras)
    if args.json:
        print(json.dumps(asdict(found), indent=2))
    else:
        print(f"{found.megabytes:.0f} MB of packages in {found.seconds:.0f} s, torch: {found.has_torch}")
        print(*(f"{size:8.1f} MB  {name}" for name, size in found.largest.items()), sep="\n")
    return 0 if found.megabytes <= args.most else 1


if __name__ == "__main__":
    sys.exit(main())
