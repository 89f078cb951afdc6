#!/usr/bin/env python3
"""Stands in for a C compiler where there is none: gives out what a real one has compiled, by the source's digest.

Triton 3.7 has one helper of its own compiled when it first meets a GPU: `CC SOURCE -O3 -shared … -o OUTPUT …`. In an
image with this script as CC it gets the one from beside the script. With REAL_CC set the real one is asked, and what
it compiled is kept here: that is how the image's build fills the directory. The source alone is the key, since image
and architecture are the same in both.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    source, output = _source_and_output(arguments)
    kept = Path(__file__).resolve().parent / f"{hashlib.sha256(source.read_bytes()).hexdigest()}.so"
    if real := os.environ.get("REAL_CC"):
        subprocess.run([real, *arguments], check=True)
        shutil.copyfile(output, kept)
        return 0
    if not kept.exists():
        print(
            f"This image has no C compiler, and {source.name} was not compiled when it was built: another version of "
            "Triton asks for it. Rebuild the image, or set CC to a compiler.",
            file=sys.stderr,
        )
        return 1
    shutil.copyfile(kept, output)
    return 0


def _source_and_output(arguments: list[str]) -> tuple[Path, Path]:
    sources = [each for each in arguments if each.endswith(".c")]
    if len(sources) != 1 or "-o" not in arguments[:-1]:
        raise SystemExit(f"This stands in for a compiler of one C file at a time, and was called with {arguments}.")
    return Path(sources[0]), Path(arguments[arguments.index("-o") + 1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
