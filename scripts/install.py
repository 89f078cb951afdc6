"""Installs this checkout into a virtual environment: what `make install`, `make serve` and `make test` run first.

    python3 scripts/install.py [--venv .venv] [--extras dev,eval] [--serve ARGUMENTS OF ostro serve]

Up to three steps, of which only those that are due run: the packages, the native CPU core, and with --serve the default
model, unless the arguments name another. The core compiles in the background while the rest is fetched. What was done
is noted in the environment, so that a second call returns at once.

Torch is an extra. It is installed where the machine has an NVIDIA GPU, and where the core cannot be compiled.

Variables:
    TORCH_INDEX_URL    an index of torch builds; without it torch comes from where pip finds everything else
    ALLOW_CUDA=1       fetch a CUDA build of torch although there is no NVIDIA GPU here
    CXX                the C++ compiler

The standard library alone, and no syntax that an older Python could not parse: it tells its user that it is too old.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
LIBRARY = ROOT / "src" / "ostro" / "kernels" / "cpu"

# Megabytes of the wheels that constraints.txt pins, without torch's own. x86-64 and ARM differ by little.
PACKAGES_MB = 21 if sys.platform == "darwin" else 37
EXTRAS_MB = {"dev": 580, "jax": 120, "torch": 10}
MODEL_MB = 93
FOR_TESTS = (
    "The extra dev is for tests and checks; serving needs nothing of it. To keep it out of the environment that you "
    "serve from, stop here and name another: make test VENV=.venv-dev"
)
# A pip that reads a wheel's metadata without downloading the wheel.
METADATA_PIP = (24, 0)

INTERRUPT_SECONDS = 5.0
# What is imported on the way is compiled for good, whatever the user's settings are.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

APPLICABLE = """
import json, sys
from pip._vendor.packaging.requirements import Requirement
required = [Requirement(each) for each in json.loads(sys.argv[1])]
print(json.dumps([each.name for each in required if not each.marker or each.marker.evaluate({"extra": ""})]))
"""


# What the core is compiled for where tests compare what it computes on all kinds of CPUs.
ALL_CPUS = "all"


class Failed(Exception):
    """Ends the installation. Its text is for the user, and says what to do."""


# --- processes ------------------------------------------------------------------------------------------------------


class Stopped(BaseException):
    """A signal asked the installation to end."""

    def __init__(self, number: int) -> None:
        self.number = number


class Signals:
    """Turns signals into Stopped, but not while a process is being started or stopped: that would leave it running."""

    def __init__(self) -> None:
        self.held: list[int] | None = None

    def listen(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Ignored for a reason: `nohup` ignores one, and shells do so for what they start in the background.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._arrived)

    def _arrived(self, number: int, frame: object) -> None:
        if self.held is None:
            raise Stopped(number)
        self.held.append(number)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Defers signals within the block."""
        held: list[int] = []
        self.held = held
        try:
            yield
        finally:
            self.held = None
        if held:
            raise Stopped(held[0])


SIGNALS = Signals()


@contextmanager
def started(
    command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, output: IO[bytes] | int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does not outlive the block, nor does anything that it starts.

    It has a session of its own, so that it can be stopped with all its children; it does not see the terminal's Ctrl-C.
    """
    process = None
    try:
        with SIGNALS.hold():
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**ENVIRONMENT, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output if isinstance(output, io.IOBase) else None,
                start_new_session=True,
            )
        yield process
    finally:
        if process is not None:
            with SIGNALS.hold():
                stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and its children, if it is still running."""
    if process.poll() is not None:
        return
    # pip deletes its temporary files when it is interrupted, and not when it is killed.
    os.killpg(process.pid, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(INTERRUPT_SECONDS)
    # Children of shells may ignore interrupts.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(command: Sequence[str | Path], failure: str, *, env: Mapping[str, str] | None = None) -> None:
    with started(command, env=env) as process:
        if process.wait() != 0:
            raise Failed(failure)


def output_of(command: Sequence[str | Path], failure: str, *, env: Mapping[str, str] | None = None) -> str:
    """Its standard output. Standard error goes to the terminal."""
    with started(command, env=env, output=subprocess.PIPE) as process:
        printed, _ = process.communicate()
        if process.returncode != 0:
            raise Failed(failure)
        return printed.decode()


# --- what is installed, and what should be --------------------------------------------------------------------------


class Project:
    """What pyproject.toml, constraints.txt and native/ ask for."""

    def __init__(self, root: Path = ROOT) -> None:
        import tomllib  # not in the Pythons that are told that they are too old

        self.table = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
        self.constraints = (root / "constraints.txt").read_text(encoding="utf-8")
        self.native = [root / "native" / "CMakeLists.txt", *sorted((root / "native" / "src").iterdir())]

    def requirements(self, extras: Sequence[str]) -> list[str]:
        optional = self.table["project"]["optional-dependencies"]
        if unknown := sorted(set(extras) - set(optional)):
            raise Failed(f"There is no extra {', '.join(unknown)}. Choose among {', '.join(sorted(optional))}.")
        return [*self.table["project"]["dependencies"], *(each for extra in extras for each in optional[extra])]

    def pinned(self, name: str) -> str:
        match = re.search(rf"^{re.escape(name)}==(\S+)", self.constraints, re.MULTILINE)
        assert match is not None, f"constraints.txt does not pin {name}"
        return match[1]

    def packages_fingerprint(self, extras: Sequence[str]) -> str:
        return _digest(json.dumps(self.requirements(sorted(extras))), self.constraints)

    def native_fingerprint(self) -> str:
        """Includes the package's own metadata, which is installed with the core."""
        tables = [self.table["build-system"], self.table["project"], self.table["tool"]["scikit-build"]]
        sources = [f"{path.name}\n{path.read_text(encoding='utf-8')}" for path in self.native]
        return _digest(json.dumps(tables), *sources)


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


class Record:
    """What was installed into an environment, as its file of notes has it."""

    def __init__(self, venv: Path) -> None:
        self.path = venv / "ostro-installed.json"
        try:
            noted = json.loads(self.path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            noted = {}
        self.packages: dict[str, str] = noted.get("packages", {})
        self.native: dict[str, str | None] = noted.get("native", {})

    def has_packages(self, project: Project, extras: Sequence[str]) -> bool:
        """Whether these extras are installed, alone or with others: what `make test` installs is enough to serve."""
        for key, fingerprint in self.packages.items():
            names = key.split(",") if key else []
            with suppress(Failed):  # an extra that is no more
                if set(extras) <= set(names) and fingerprint == project.packages_fingerprint(names):
                    return True
        return False

    def has_native(self, project: Project, compiler: str | None, cpus: str) -> bool:
        """Whether the core is built for these CPUs, or cannot be: a compiler that failed is not tried again."""
        if self.native.get("fingerprint") != project.native_fingerprint():
            return False
        if library_exists():
            return self.native.get("cpus") in (ALL_CPUS, cpus)
        return compiler in (None, self.native["tried"])

    def note_packages(self, project: Project, extras: Sequence[str]) -> None:
        self.packages[",".join(sorted(extras))] = project.packages_fingerprint(extras)
        self._write()

    def note_native(self, project: Project, compiler: str | None, cpus: str) -> None:
        """`compiler` is the one that was tried."""
        failed = None if library_exists() else compiler
        self.native = {"fingerprint": project.native_fingerprint(), "tried": failed, "cpus": cpus}
        self._write()

    def _write(self) -> None:
        noted = {"packages": self.packages, "native": self.native}
        self.path.write_text(json.dumps(noted, indent=2) + "\n", encoding="utf-8")


def library_exists() -> bool:
    return any(LIBRARY.glob("libostro_native.*"))


# --- the environment and its packages -------------------------------------------------------------------------------


class Environment:
    """A virtual environment, and pip in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.python = directory / "bin" / "python"

    def make(self) -> None:
        if not self.python.exists():
            run(
                [sys.executable, "-m", "venv", self.directory],
                f"{sys.executable} could not make a virtual environment in {self.directory}: see above. On Debian and "
                "Ubuntu it needs a package: apt-get install python3-venv",
            )
        # An old pip downloads what it was only asked about, and takes longer. It is replaced while no other runs.
        version = tuple(int(part) for part in re.findall(r"\d+", self.version("pip") or "0")[:2])
        if version < METADATA_PIP:
            self.install("--upgrade", "pip", quiet=True)

    def pip(self, *arguments: str | Path) -> list[str | Path]:
        return [self.python, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]

    def install(self, *arguments: str | Path, index: str | None = None, quiet: bool = False) -> None:
        """Without byte-compiling: what is imported is compiled then, and most of torch never is imported."""
        chosen = ["--index-url", index] if index else []
        # Where nobody watches it, a bar is only noise in a log.
        shown = ["--quiet"] if quiet else [] if sys.stdout.isatty() else ["--progress-bar", "off"]
        command = self.pip("install", "--no-compile", *shown, *chosen, "-c", CONSTRAINTS, *arguments)
        run(command, "pip failed: see above. What it has downloaded is in its cache; make again once that is mended.")

    def compile(self) -> None:
        """Byte-compiles all that is installed, on all cores, as far as it compiles: pip does it on one."""
        packages = list(self.directory.glob("lib/python3*/site-packages"))
        with started([self.python, "-m", "compileall", "-qq", "-j", "0", *packages]) as process:
            process.wait()

    def applicable(self, requirements: Sequence[str]) -> list[str]:
        """Names of those packages whose markers hold here. pip brings the reader of markers with it."""
        failure = f"pip in {self.directory} is damaged. Delete that directory, and make again."
        return list(json.loads(output_of([self.python, "-c", APPLICABLE, json.dumps(list(requirements))], failure)))

    def version(self, package: str) -> str | None:
        found = list(self.directory.glob(f"lib/python3*/site-packages/{package}-*.dist-info"))
        return found[0].name.removesuffix(".dist-info").partition("-")[2] if found else None


class Torch:
    """The build of torch that pip would install, found out without downloading it.

    Metadata comes from the index or, where it has none apart, from the end of the wheel (fast-deps). If neither can be
    read alone, pip downloads the wheel, but nothing that it depends on.
    """

    def __init__(self, environment: Environment, index: str | None) -> None:
        chosen = ["--index-url", index] if index else []
        # Quiet to the second degree: not a word of fast-deps being experimental.
        asked = ["-qq", "--dry-run", "--no-deps", "--use-feature=fast-deps", "--report", "-"]
        command = environment.pip("install", *asked, *chosen, "-c", CONSTRAINTS, "torch")
        missing = "pip finds no torch for this Python: see above. TORCH_INDEX_URL names another index."
        [found] = json.loads(output_of(command, missing))["install"]
        self.version: str = found["metadata"]["version"]
        self.url: str = found["download_info"]["url"]
        required = environment.applicable(found["metadata"].get("requires_dist", []))
        self.cuda = [name for name in required if name.startswith(("nvidia-", "cuda-"))]

    def size(self) -> int | None:
        """Bytes of its wheel; None if the index does not tell."""
        place = urllib.parse.urlparse(self.url)
        try:
            if place.scheme == "file":
                return Path(urllib.request.url2pathname(place.path)).stat().st_size
            with urllib.request.urlopen(urllib.request.Request(self.url, method="HEAD"), timeout=5) as answer:
                return int(answer.headers["Content-Length"])
        except (OSError, TypeError, ValueError):
            return None


def has_nvidia_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def extras_here(extras: Sequence[str], compiler: str | None) -> list[str]:
    """Requested extras, plus torch where there is a GPU, or no native core and no way to build one."""
    needed = has_nvidia_gpu() or not (compiler or library_exists())
    return [*extras, "torch"] if needed and "torch" not in extras else list(extras)


def wants_torch(requirements: Sequence[str]) -> bool:
    return any(re.match(r"torch\b(?!\w|-)", each) for each in requirements)


def choose_torch(environment: Environment, project: Project) -> Torch | None:
    """The torch to be fetched; None if it is there. Raises Failed rather than fetch CUDA's gigabytes for nothing."""
    if (environment.version("torch") or "").partition("+")[0] == project.pinned("torch"):
        return None
    torch = Torch(environment, os.environ.get("TORCH_INDEX_URL"))
    if torch.cuda and not has_nvidia_gpu() and not os.environ.get("ALLOW_CUDA"):
        raise Failed(
            f"There is no NVIDIA GPU here, and pip would fetch the CUDA build of torch {torch.version} "
            f"({', '.join(torch.cuda)}): gigabytes that nothing would use. Set TORCH_INDEX_URL to "
            'the address that the "Get started" page of PyTorch gives for pip and CPU, as in\n'
            "    make serve TORCH_INDEX_URL=…\n"
            "or accept it: make serve ALLOW_CUDA=1. More: docs/installation.md"
        )
    return torch


# --- the native core ------------------------------------------------------------------------------------------------


def cpu_here() -> str:
    """Stands for the instructions that this machine's CPU has. For it alone, the core compiles in half the time."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "here"
    told = (line for line in lines if line.startswith(("flags", "Features")))
    return _digest(next(told, ""))


def find_compiler() -> str | None:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((found for name in names if (found := shutil.which(name))), None)


class Build:
    """The package itself, with the core compiled if there is a compiler: in the background, its output in a file."""

    def __init__(self, environment: Environment, compiler: str | None, cpus: str, stack: ExitStack) -> None:
        self.compiler = compiler
        self.log = environment.directory / "ostro-build.log"
        # None is better than one of other sources.
        for former in LIBRARY.glob("libostro_native.*"):
            former.unlink()
        tables = "all" if cpus == ALL_CPUS else "here"
        options = ["-C", f"cmake.define.OSTRO_TABLES={tables}" if compiler else "wheel.cmake=false"]
        command = environment.pip("install", "-v", "--no-compile", "--no-deps", *options, "-e", ROOT)
        self.began = time.monotonic()
        with self.log.open("wb") as log:
            self.process = stack.enter_context(started(command, output=log))

    def finish(self) -> str:
        """Waits for the build; returns its outcome in a line."""
        if self.process.wait() != 0:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
            raise Failed(f"{tail}\nOstro itself could not be installed: see above, and {self.log}.")
        if library_exists():
            return f"compiled in {time.monotonic() - self.began:.0f} s"
        if self.compiler:
            return f"{self.compiler} could not compile it, so models need torch, and run slower. See {self.log}"
        return (
            "no C++ compiler here, so models need torch, and run slower. To have it, install one "
            f"({'xcode-select --install' if sys.platform == 'darwin' else 'apt-get install g++'}) and make again"
        )


# --- the model ------------------------------------------------------------------------------------------------------


def serves_default_model(environment: Environment, arguments: Sequence[str]) -> bool:
    """Whether `ostro serve` with these arguments, in this directory and environment, would load the default model."""
    printed = output_of(
        [environment.python, "-m", "ostro", "serve", *arguments, "--print-config"],
        "`ostro serve` does not take these arguments: see above.",
        env={"PYTHONPATH": str(ROOT / "src")},
    )
    settings = dict(re.findall(r"^(\w+): (\S*)", printed, re.MULTILINE))
    # Without settings (`--help`) nothing is served.
    return all(settings.get(name) in ("[]", "null") for name in ("model", "models", "checkpoint_path", "gcs_bucket"))


def fetch_default_model(environment: Environment) -> None:
    program = "from ostro.weights import open_checkpoint; open_checkpoint(None)"
    run(
        [environment.python, "-c", program],
        "The default model could not be fetched: see above. A model of your own: make serve ARGS=./my-model",
        env={"PYTHONPATH": str(ROOT / "src")},
    )


# --- all of it ------------------------------------------------------------------------------------------------------


class Steps:
    """The steps that are due, numbered as they are announced."""

    def __init__(self, titles: Mapping[str, str]) -> None:
        self.titles = titles
        self.number = {name: f"{place}/{len(titles)}" for place, name in enumerate(titles, 1)}

    def plan(self) -> str:
        return " · ".join(f"{self.number[name]} {title}" for name, title in self.titles.items())

    def say(self, name: str, text: str) -> None:
        print(f"{self.number[name]} {name}: {text}", flush=True)


def install(venv: Path, extras: Sequence[str], serve: Sequence[str] | None) -> None:
    project, record, compiler = Project(), Record(venv), find_compiler()
    extras = extras_here(extras, compiler)
    requirements = project.requirements(extras)
    # Later on the server fetches what it lacks.
    if record.packages:
        serve = None
    cpus = ALL_CPUS if "dev" in extras else cpu_here()
    packages_due, native_due = not record.has_packages(project, extras), not record.has_native(project, compiler, cpus)
    if not packages_due and not native_due:
        return
    began = time.monotonic()
    print(f"Installing Ostro into {venv}, with Python {sys.version.split()[0]}", flush=True)
    environment = Environment(venv)
    environment.make()
    with ExitStack() as stack:
        build = Build(environment, compiler, cpus, stack) if native_due else None
        torch = choose_torch(environment, project) if packages_due and wants_torch(requirements) else None
        titles = {}
        if packages_due:
            has_serving = record.has_packages(project, [])
            titles["packages"] = f"packages {_size_of_packages(extras, torch, has_serving=has_serving)}"
        if native_due:
            titles["native core"] = "native core"
        if serve is not None:
            titles["model"] = f"model {MODEL_MB} MB"
        steps = Steps(titles)
        print(steps.plan(), flush=True)
        if packages_due and "dev" in extras:
            print(FOR_TESTS, flush=True)
        if packages_due:
            since = time.monotonic()
            install_packages(environment, requirements, torch)
            if "dev" in extras:
                # Tests start processes by the hundred, on some machines with PYTHONDONTWRITEBYTECODE.
                environment.compile()
            record.note_packages(project, extras)
            steps.say("packages", f"installed in {time.monotonic() - since:.0f} s")
        if serve is not None:
            since = time.monotonic()
            if serves_default_model(environment, serve):
                fetch_default_model(environment)
                steps.say("model", f"in the cache after {time.monotonic() - since:.0f} s")
            else:
                steps.say("model", "yours, so the default model is not fetched")
        if build is not None:
            if build.process.poll() is None:
                steps.say("native core", "compiling …")
            steps.say("native core", build.finish())
            if not library_exists() and not wants_torch(requirements):
                install_packages(environment, project.requirements(["torch"]), choose_torch(environment, project))
            record.note_native(project, compiler, cpus)
    print(f"Installed in {time.monotonic() - began:.0f} s", flush=True)


def install_packages(environment: Environment, requirements: Sequence[str], torch: Torch | None) -> None:
    if torch is not None and (index := os.environ.get("TORCH_INDEX_URL")):
        environment.install("torch", index=index)
    # The environment has pip, and another pip of it may be building the core: it is not to be replaced now.
    environment.install(*(each for each in requirements if not re.match(r"pip\b(?!-)", each)))


def _size_of_packages(extras: Sequence[str], torch: Torch | None, *, has_serving: bool = False) -> str:
    """Megabytes by what they are for; without those of serving where the environment has them."""
    parts = [] if has_serving else [f"{PACKAGES_MB} MB"]
    parts += [f"{each} {EXTRAS_MB[each]} MB" if each in EXTRAS_MB else f"{each}, of unknown size" for each in extras]
    if torch is not None:
        size = torch.size()
        parts.append(f"torch {torch.version} {f'{size / 1e6:.0f} MB' if size else ''}".rstrip())
    return " + ".join(parts) or "of other versions"


def main(argv: Sequence[str] | None = None) -> int:
    if sys.version_info < (3, 11):  # noqa: UP036
        version = ".".join(str(part) for part in sys.version_info[:3])
        print(f"Ostro needs Python 3.11 or later, and {sys.executable} is {version}.", file=sys.stderr)
        print("Name another one: make serve PYTHON=python3.12", file=sys.stderr)
        return 1
    parser = argparse.ArgumentParser(description="Installs this checkout into a virtual environment.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where (default: .venv of the checkout)")
    parser.add_argument("--extras", default="", help="of pyproject.toml, separated by commas")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, help="fetch the model that `ostro serve` would with these")
    args = parser.parse_args(argv)
    SIGNALS.listen()
    try:
        install(args.venv.absolute(), [each for each in args.extras.split(",") if each], args.serve)
    except Failed as failure:
        print(failure, file=sys.stderr)
        return 1
    except Stopped as stopped:
        print("Stopped. Run make again to go on from here.", file=sys.stderr)
        return 128 + stopped.number
    return 0


if __name__ == "__main__":
    sys.exit(main())
