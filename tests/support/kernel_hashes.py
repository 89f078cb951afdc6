"""Run as a program, without Triton's interpreter: hashes of all kernels, asked for in the order in which their modules
are `imported`, or `reversed`. Prints them by name, as JSON.
"""

import json
import sys

from triton.runtime import JITFunction

import ostro.backends.cuda.runner  # noqa: F401  imports all kernels
from ostro.kernels.gpu.signatures import digest_sources


def main(order: str) -> None:
    names = [name for name in sys.modules if name.startswith("ostro.kernels.gpu.")]
    if order == "reversed":
        for name in reversed(names):
            sys.modules[name] = sys.modules.pop(name)
    digest_sources()
    hashes = {
        f"{name}.{kernel}": each.cache_key
        for name in sorted(names)
        for kernel, each in vars(sys.modules[name]).items()
        if isinstance(each, JITFunction)
    }
    print(json.dumps(hashes))


main(sys.argv[1])
