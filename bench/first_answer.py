"""From nothing to the first answer, as a new user has it: how long, and where the seconds go.

python bench/first_answer.py           # a fresh clone: `make serve` to a right streamed answer
python bench/first_answer.py torch     # the same, with torch in the clone's environment already
python bench/first_answer.py wheel     # a wheel, an environment of its own, no compiler: pip to a right answer
python bench/first_answer.py index     # `pip install ostro` from a local index with the wheels in dist/
python bench/first_answer.py uvx       # `uvx ostro serve` from the same index

Caches are empty: those of pip and uv, and Ostro's. The clone is of the last commit; the wheel is built before the clock
starts, or given by --wheel; for an index the environment is made before it starts, and --dist names the directory of
the wheels. Everything happens in a scratch directory that is deleted in the end, and nothing that was started is left.
"""

import argparse
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from local_index import LocalIndex, local_index

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results" / "first_answer.json"
QUESTION = "What is the capital of France?"
MOST_SECONDS = {"clone": 90, "torch": 60, "wheel": 40, "index": 20, "uvx": 20}
DEADLINE_SECONDS = 1200.0
SERVE = ["--port", "0", "--log-format", "json"]


class Timeline:
    """Events and their times since the clock was started."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.events: list[tuple[float, str]] = []

    def mark(self, event: str) -> None:
        self.events.append((round(time.monotonic() - self.began, 1), event))
        print(f"{self.events[-1][0]:7.1f} s  {event}", flush=True)


class Program:
    """A running command whose output is read as it comes: steps of the installation and the server's log."""

    def __init__(self, command: Sequence[str | Path], cwd: Path, env: Mapping[str, str], timeline: Timeline) -> None:
        self.timeline = timeline
        self.url: str | None = None
        self.said: list[str] = []
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.rstrip())
            if line.startswith(("Installing Ostro", "Installed in", "1/", "2/", "3/")):
                self.timeline.mark(line.strip())
            if '"listening"' in line:
                self.timeline.mark("the server listens")
                self.url = str(json.loads(line)["url"])

    def until(self, what: str, timeout: float = DEADLINE_SECONDS) -> str:
        """The server's address, once it listens and `what` (a path) answers 200."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self.process.poll() is None:
            if self.url is not None and _answers(self.url + what):
                return self.url
            time.sleep(0.05)
        raise SystemExit("\n".join([*self.said[-40:], f"No answer from {what}: the last that was said is above."]))

    def stop(self) -> None:
        for number, patience in ((signal.SIGTERM, 30), (signal.SIGKILL, None)):
            if self.process.poll() is None:
                os.killpg(self.process.pid, number)
                try:
                    self.process.wait(patience)
                except subprocess.TimeoutExpired:
                    continue
        # Nobody has the other end any more.
        self.reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def ask(url: str, timeline: Timeline) -> str:
    """The streamed answer to QUESTION. Ends the program unless it comes to an end of its own, and is right."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 64, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    text, finish, done = "", None, False
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            data = line.decode().removeprefix("data: ").strip()
            if data == "[DONE]":
                done = True
            elif data:
                choice = json.loads(data)["choices"][0]
                if piece := choice["delta"].get("content") or "":
                    if not text:
                        timeline.mark("the first token")
                    text += piece
                finish = choice["finish_reason"] or finish
    if "Paris" not in text or finish != "stop" or not done:
        raise SystemExit(f"The answer is not right, or has no end ({finish}): {text!r}")
    timeline.mark(f"the answer: {text}")
    return text


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ostro-first-answer-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def clean_environment(directory: Path) -> dict[str, str]:
    """Environment of a user who has configured pip's sources and nothing of Ostro's."""
    ours = ("OSTRO_", "PYTHON", "VIRTUAL_ENV", "MAKE", "MFLAGS", "PORT", "XDG_CACHE_HOME", "LOCAL_MODEL_CACHE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    # A user does not have the virtual environment that this program runs in.
    places = [each for each in kept.get("PATH", "").split(os.pathsep) if not (Path(each) / "activate").exists()]
    return kept | {
        "PATH": os.pathsep.join(places),
        "OSTRO_CACHE": str(directory / "cache"),
        "PIP_CACHE_DIR": str(directory / "pip-cache"),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "UV_CACHE_DIR": str(directory / "uv-cache"),
        "UV_TOOL_DIR": str(directory / "uv-tools"),
    }


def from_clone(directory: Path, *, with_torch: bool) -> Timeline:
    clone, env = directory / "ostro", clean_environment(directory)
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    if with_torch:
        subprocess.run(["python3", "-m", "venv", ".venv"], cwd=clone, env=env, check=True)
        command = [
            ".venv/bin/python",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-compile",
            "-c",
            "constraints.txt",
            "torch",
        ]
        subprocess.run(command, cwd=clone, env=env, check=True)
    timeline = Timeline()
    program = Program(["make", "serve", f"ARGS={shlex.join(SERVE)}"], clone, env, timeline)
    try:
        _first_answer(program, timeline)
    finally:
        program.stop()
    return timeline


def from_wheel(directory: Path, wheel: Path | None) -> Timeline:
    wheel = wheel or build_wheel(directory)
    venv, env = directory / "venv", clean_environment(directory)
    # No compiler, no CMake, no git: nothing but the environment itself.
    env["PATH"] = str(venv / "bin")
    timeline = Timeline()
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    timeline.mark("environment made")
    pip: list[str | Path] = [venv / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-compile"]
    pip += ["-c", ROOT / "constraints.txt"]
    subprocess.run([*pip, "--upgrade", "pip"], cwd=directory, env=env, check=True)
    timeline.mark("pip renewed")
    subprocess.run([*pip, wheel], cwd=directory, env=env, check=True)
    timeline.mark(f"{wheel.name} installed")
    assert shutil.which("c++", path=env["PATH"]) is None
    _serve_natively([venv / "bin" / "ostro", "serve", *SERVE], directory, env, timeline)
    return timeline


def from_index(directory: Path, dist: Path) -> Timeline:
    """`pip install ostro` as its users type it, without our constraints, and `ostro serve`."""
    venv, env = directory / "venv", clean_environment(directory)
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    env["PATH"] = str(venv / "bin")
    with local_index(dist) as index:
        timeline = Timeline()
        command: list[str | Path] = [
            venv / "bin" / "pip",
            "install",
            "--quiet",
            "--extra-index-url",
            index.url,
            "ostro",
        ]
        subprocess.run(command, cwd=directory, env=env, check=True)
        timeline.mark(f"{_fetched(index)} installed")
    _serve_natively([venv / "bin" / "ostro", "serve", *SERVE], directory, env, timeline)
    return timeline


def from_uvx(directory: Path, dist: Path) -> Timeline:
    """`uvx ostro serve`: an environment that uv makes and forgets."""
    env = clean_environment(directory)
    if (uv := shutil.which("uvx")) is None:
        raise SystemExit("uvx is not installed. Run: pip install uv")
    with local_index(dist) as index:
        timeline = Timeline()
        # This Python, rather than one that uv would fetch.
        command = [uv, "--quiet", "--python", sys.executable, "--index", index.url, "ostro", "serve", *SERVE]
        _serve_natively(command, directory, env, timeline)
        _fetched(index)
    return timeline


def _fetched(index: LocalIndex) -> str:
    """The wheel that came from the local index. Ends the program if it came from elsewhere."""
    wheels = [name for name in index.fetched if name.endswith(".whl")]
    if not wheels:
        raise SystemExit("ostro came from another index, or was built from source: the local one gave out no wheel.")
    return wheels[0]


def _serve_natively(command: Sequence[str | Path], directory: Path, env: Mapping[str, str], timeline: Timeline) -> None:
    """Serves until the first answer. Ends the program unless it is the native core's."""
    program = Program(command, directory, env, timeline)
    try:
        url = _first_answer(program, timeline)
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
            [model] = json.load(answer)["data"]
        if not str(model["backend"]).startswith("native"):
            raise SystemExit(f"The wheel's native core does not run: {model['backend']}")
    finally:
        program.stop()


def build_wheel(directory: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--wheel-dir", directory / "dist", ROOT], check=True)
    [wheel] = (directory / "dist").glob("*.whl")
    return wheel


def _first_answer(program: Program, timeline: Timeline) -> str:
    url = program.until("/readyz")
    timeline.mark("the model is loaded")
    ask(url, timeline)
    return url


def main() -> None:
    parser = argparse.ArgumentParser(description="From nothing to the first answer.")
    parser.add_argument("start", nargs="?", choices=sorted(MOST_SECONDS), default="clone")
    parser.add_argument("--wheel", type=Path, help="for `wheel`: one that was built before")
    parser.add_argument(
        "--dist", type=Path, default=ROOT / "dist", help="for `index` and `uvx`: what `make dist` wrote"
    )
    parser.add_argument("--most", type=float, help="fail above so many seconds, on a machine of another speed")
    parser.add_argument("--save", action="store_true", help=f"keep the timeline in {RESULTS.relative_to(ROOT)}")
    args = parser.parse_args()
    # Ctrl-C and SIGTERM alike: whatever runs is stopped on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    load = os.getloadavg()[0]
    with scratch() as directory:
        if args.start == "wheel":
            timeline = from_wheel(directory, args.wheel.absolute() if args.wheel else None)
        elif args.start == "index":
            timeline = from_index(directory, args.dist)
        elif args.start == "uvx":
            timeline = from_uvx(directory, args.dist)
        else:
            timeline = from_clone(directory, with_torch=args.start == "torch")
    seconds = timeline.events[-1][0]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    most = args.most or MOST_SECONDS[args.start]
    print(f"{seconds:.1f} s, at most {most:g} wanted; the load before it was {load:.1f}")
    print(f"{used.ru_utime + used.ru_stime:.0f} s of CPU time, with what came before the clock")
    if args.save:
        saved = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
        saved[args.start] = {"seconds": seconds, "load": round(load, 1), "timeline": timeline.events}
        RESULTS.write_text(json.dumps(saved, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if seconds > most:
        sys.exit(1)


if __name__ == "__main__":
    main()
