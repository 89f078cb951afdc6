"""Has Triton's helper for NVIDIA GPUs compiled into a directory, on a machine that has a compiler and needs no GPU.

DIRECTORY/cc       the stand-in for a compiler: see prebuilt_cc.py
DIRECTORY/*.so     what it gives out

With --or-none a torch for CPUs, which has no Triton, gets the stand-in alone.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# Triton's own code asks for the helper, so that it is compiled from the source that a server will ask for. Bound late,
# the functions of a driver that is not here are not missed.
_ASK = (
    "import os, sys; sys.setdlopenflags(os.RTLD_LAZY); from triton.backends.nvidia.driver import CudaUtils; CudaUtils()"
)


def main(directory: Path, *, or_none: bool = False) -> None:
    has_triton = importlib.util.find_spec("triton") is not None
    if not has_triton and not or_none:
        raise SystemExit("This build of torch is for CPUs: it has no Triton. Leave TORCH_INDEX_URL out.")
    directory.mkdir(parents=True, exist_ok=True)
    stand_in = directory / "cc"
    shutil.copyfile(Path(__file__).with_name("prebuilt_cc.py"), stand_in)
    stand_in.chmod(0o755)
    if not has_triton:
        print("This build of torch is for CPUs: nothing was compiled for Triton.")
        return
    with tempfile.TemporaryDirectory() as scratch:
        # What it is linked against comes from the driver, with the GPU: an empty library of that name does here.
        library = Path(scratch) / "libcuda.so.1"
        subprocess.run(["gcc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", library, "-x", "c", os.devnull], check=True)
        environment = os.environ | {
            "CC": str(stand_in),
            "REAL_CC": "gcc",
            "LD_LIBRARY_PATH": scratch,
            "TRITON_LIBCUDA_PATH": scratch,
            "TRITON_CACHE_DIR": str(Path(scratch) / "cache"),
        }
        subprocess.run([sys.executable, "-c", _ASK], env=environment, check=True)
    built = sorted(directory.glob("*.so"))
    if not built:
        raise SystemExit("Triton asked for nothing to be compiled. This step and CC in the Dockerfile can go.")
    print(f"compiled for Triton: {', '.join(each.name for each in built)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Has Triton's helper compiled ahead.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--or-none", action="store_true", help="succeed where torch has no Triton")
    args = parser.parse_args()
    main(args.directory, or_none=args.or_none)
