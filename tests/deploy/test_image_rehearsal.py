"""The steps of the Dockerfile's `cpu` and `hrm-serve` targets, run without a container engine: paths of the image lie
under a scratch directory, stages share it, and the few commands that need root do less. Then the image's command serves
under its variables, and its health check asks it. Needs the network, as a build does: `make rehearse-image`.
"""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from checkout import ROOT
from dockerfile import Dockerfile, Instruction, read_dockerfile

from ostro.sources.cache import cache_root

PLACES = ["/opt/venv", "/opt/triton", "/src", "/cache", "/srv", "/var/lib/apt"]
# What an image's build may do and a test may not.
STAND_INS = {
    "groupadd": ":",
    "useradd": ":",
    "install": 'for last; do :; done; mkdir -p "$last"',
    "apt-get": ":",
}


class Rehearsal:
    """One build of a target, and what it leaves."""

    def __init__(self, dockerfile: Dockerfile, scratch: Path) -> None:
        self.dockerfile = dockerfile
        self.scratch = scratch
        self.directory = scratch
        self.environment = {name: value for name, value in os.environ.items() if not _is_our_own(name)}
        tools = scratch / "tools"
        tools.mkdir(parents=True)
        for name, body in STAND_INS.items():
            (tools / name).write_text(f"#!/bin/sh\n{body}\n")
            (tools / name).chmod(0o755)
        # The base image's: the one that runs this may be that of a virtual environment.
        (tools / "python").symlink_to(Path(sys.base_prefix) / "bin" / "python3")
        self.path = f"{tools}:/usr/local/bin:/usr/bin:/bin"

    def build(self, target: str) -> None:
        outside = dict(self.environment)
        for name in self._stages(target):
            # A stage begins with its base's variables; what only its build was told ends with it.
            self.environment = outside | {"PATH": self.path}
            for instruction in self.dockerfile.instructions(name):
                if instruction.name == "ENV" and instruction not in self.dockerfile.stages[name].instructions:
                    self._step(instruction)
            for instruction in self.dockerfile.stages[name].instructions:
                self._step(instruction)

    def _stages(self, target: str) -> list[str]:
        """In the order in which they are built: those that files are copied from, too."""
        found: list[str] = []
        for stage in self.dockerfile.chain(target):
            for copy in stage.all("COPY"):
                if match := re.search(r"--from=(\S+)", copy.value):
                    found += self._stages(match[1])
            found.append(stage.name)
        return list(dict.fromkeys(found))

    def start(self, target: str, log: Path, **changes: str) -> subprocess.Popen[bytes]:
        command = self.dockerfile.last(target, "ENTRYPOINT").words + self.dockerfile.last(target, "CMD").words
        self.environment |= changes
        program = shutil.which(command[0], path=self.environment["PATH"])
        assert program is not None
        with log.open("wb") as sink:
            return subprocess.Popen(
                [program, *command[1:]], cwd=self.directory, env=self.environment, stdout=sink, stderr=sink
            )

    def is_healthy(self, target: str, pid: int) -> bool:
        """By the image's check; in a container the server would be process 1."""
        command = [self.here(word) for word in self.dockerfile.last(target, "HEALTHCHECK").words]
        program = shutil.which(command[0], path=self.environment["PATH"])
        assert program is not None
        return subprocess.run([program, *command[1:], str(pid)], env=self.environment, check=False).returncode == 0

    def here(self, text: str) -> str:
        """With paths of the image as paths under the scratch directory."""
        return re.sub(rf"(?<![\w/.])({'|'.join(PLACES)})(?![\w-])", rf"{self.scratch}\1", text)

    def _step(self, instruction: Instruction) -> None:
        match instruction.name:
            case "ENV":
                for key, value in instruction.pairs.items():
                    self.environment[key] = self.here(value).replace("$PATH", self.environment["PATH"])
            case "ARG":
                self.environment |= instruction.pairs
            case "WORKDIR":
                self.directory = Path(self.here(instruction.value))
                self.directory.mkdir(parents=True, exist_ok=True)
            case "COPY":
                self._copy(instruction)
            case "RUN":
                command = ["sh", "-ec", self.here(instruction.command)]
                subprocess.run(command, cwd=self.directory, env=self.environment, check=True)
            case "LABEL" | "VOLUME" | "EXPOSE" | "STOPSIGNAL" | "HEALTHCHECK" | "ENTRYPOINT" | "CMD" | "USER":
                pass
            case other:
                raise AssertionError(f"{other} is not rehearsed")

    def _copy(self, instruction: Instruction) -> None:
        *sources, target = (word for word in shlex.split(instruction.value) if not word.startswith("--"))
        destination = self.directory / self.here(target)
        if "--from=" in instruction.value:
            # Another stage's, which is here already.
            assert [self.here(each) for each in sources] == [str(destination)]
            assert destination.exists()
            return
        for source in sources:
            path = ROOT / source
            if path.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "libostro_native.*")
                shutil.copytree(path, destination, dirs_exist_ok=True, ignore=ignored)
            else:
                within = destination / path.name if target.endswith("/") or destination.is_dir() else destination
                within.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, within)


def _is_our_own(name: str) -> bool:
    """Whether the variable belongs to this process and would not be in a container."""
    return name.startswith(("OSTRO_", "PYTEST", "PYTHON")) or name in ("VIRTUAL_ENV", "PORT")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", ["cpu", "hrm-serve"])
def test_the_steps_make_a_server_that_answers(target: str, tmp_path: Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler here, and what the build installs is not installed")
    rehearsal = Rehearsal(read_dockerfile(ROOT / "Dockerfile"), tmp_path / "image")
    began = time.monotonic()
    rehearsal.build(target)
    print(f"\nbuilt in {time.monotonic() - began:.0f} s")
    # Fetched by the server itself where it was never fetched before.
    if (fetched := cache_root() / "pypi").is_dir():
        shutil.copytree(fetched, tmp_path / "image" / "cache" / "ostro" / "pypi")
    log = tmp_path / "log"
    # The port may be taken in the meantime: then the log says so.
    port = _free_port()
    process = rehearsal.start(target, log, PORT=str(port), OSTRO_HOST="127.0.0.1")
    try:
        deadline = time.monotonic() + 300
        while not rehearsal.is_healthy(target, process.pid):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
        print(f"healthy after {time.monotonic() - began:.0f} s")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
            while client.get("/readyz").status_code != 200:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            asked = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
            answer = client.post("/v1/chat/completions", json=asked | {"max_tokens": 12}).json()
        print(f"answered after {time.monotonic() - began:.0f} s")
        assert "Paris" in answer["choices"][0]["message"]["content"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
        assert not rehearsal.is_healthy(target, process.pid)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    # Nothing of it is this checkout's: the image would not have it.
    located = subprocess.run(
        [tmp_path / "image/opt/venv/bin/python", "-c", "import ostro; print(ostro.__file__)"],
        env=rehearsal.environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert located.stdout.startswith(str(tmp_path / "image/opt/venv"))
