"""The server as a container runs it: process 1, a uid without a name, a read-only root, two directories to write to.

Made of namespaces, with no container engine; needs root, and a system that grants them.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from checkout import ROOT
from model_directory import write_model

USER = 10001
_PATIENCE = 90.0


def _no_namespaces() -> str | None:
    """Why there can be no container here."""
    if os.geteuid() != 0:
        return "needs root"
    if missing := [name for name in ("unshare", "setpriv", "mount") if shutil.which(name) is None]:
        return f"needs {', '.join(missing)}"
    trial = "mount -t tmpfs tmpfs /mnt && mount -o remount,ro,bind /"
    command = ["unshare", "--pid", "--fork", "--mount", "--mount-proc", "sh", "-c", trial]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if result.returncode == 0 else f"the system grants no namespaces: {result.stderr.strip()}"


pytestmark = pytest.mark.skipif(bool(reason := _no_namespaces()), reason=str(reason))


def _script(model: Path, environment: dict[str, str], *arguments: str) -> str:
    """For the shell that becomes the server."""
    needed = [Path(sys.base_prefix), Path(sys.prefix), ROOT]
    # An empty directory in place of /tmp, and of whatever lies above Python and lets nobody but root in.
    covered = {Path("/tmp")}
    for path in needed:
        covered |= {each for each in [path, *path.parents] if not each.stat().st_mode & 0o001}
    lines = ["set -e", "mount -t tmpfs -o mode=755 tmpfs /mnt", "mkdir /mnt/model /mnt/cache"]
    lines += [f"mount --bind {shlex.quote(str(model))} /mnt/model", f"chown {USER}:{USER} /mnt/cache"]
    lines += [f"mkdir /mnt/{i}; mount --rbind {shlex.quote(str(path))} /mnt/{i}" for i, path in enumerate(needed)]
    for path in sorted(covered):
        mode = "1777" if path == Path("/tmp") else "755"
        lines.append(f"mkdir -p {path}; mount -t tmpfs -o mode={mode} tmpfs {shlex.quote(str(path))}")
    for i, path in enumerate(needed):
        if any(each == path or each in path.parents for each in covered):
            lines.append(f"mkdir -p {shlex.quote(str(path))}; mount --rbind /mnt/{i} {shlex.quote(str(path))}")
    lines += ["mount -o remount,ro,bind /", "cd /"]
    # Ends later, and its parent is gone by then: the server inherits it.
    lines.append("(sleep 2 &)")
    rights = [
        "setpriv",
        f"--reuid={USER}",
        f"--regid={USER}",
        "--clear-groups",
        "--no-new-privs",
        "--bounding-set=-all",
    ]
    command = [*rights, "env", "-i", *(f"{key}={value}" for key, value in environment.items())]
    command += [sys.executable, "-m", "ostro", "serve", *arguments]
    return "\n".join([*lines, f"exec {shlex.join(command)}"])


@dataclass(frozen=True)
class Container:
    url: str
    main: int
    """The server's number outside."""
    process: subprocess.Popen[bytes]
    log: Path

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=_PATIENCE, trust_env=False)


@contextmanager
def _container(directory: Path) -> Iterator[Container]:
    model = write_model(directory / "model")
    for path in (model, *model.iterdir()):
        path.chmod(0o755)
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        # As an image may leave it, for a user who has no home.
        "HOME": "/nonexistent",
        "OSTRO_CACHE": "/mnt/cache",
        "PORT": "0",
        "PYTHONPATH": str(ROOT / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "OSTRO_FAULTS": "step_seconds=0.05",
        "OSTRO_DRAIN_TIMEOUT": "60",
    }
    script = _script(model, environment, "/mnt/model", "--log-format", "json")
    log = directory / "log"
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "sh", "-c", script]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink)
    try:
        _until(lambda: '"ready"' in log.read_text() or process.poll() is not None, lambda: log.read_text())
        assert process.poll() is None, log.read_text()
        [listening] = [json.loads(line) for line in log.read_text().splitlines() if '"listening"' in line]
        [main] = _children(process.pid)
        yield Container(listening["url"], main, process, log)
    finally:
        process.kill()
        process.wait()


def _until(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


def _children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _status(int(entry.name)).get("PPid") == str(parent):
            found.append(int(entry.name))
    return found


def _names(parent: int) -> list[str]:
    return [_status(pid).get("Name", "") for pid in _children(parent)]


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


_INHERIT = """
import os, subprocess, sys, time
from ostro.processes.children import reap_orphans

assert os.getpid() == 1
own = subprocess.Popen(["sh", "-c", "exit 7"], process_group=0)
os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOWAIT)
left = [int(pid) for pid in subprocess.check_output(["sh", "-c", "for i in 1 2; do sleep 0.2 & echo $!; done"]).split()]
for pid in left:
    while "Z" not in open(f"/proc/{pid}/stat").read().split()[2]:
        time.sleep(0.01)
print(reap_orphans(), [os.path.exists(f"/proc/{pid}") for pid in left], reap_orphans(), own.wait())
"""


def test_children_of_its_own_keep_their_status_and_hide_no_orphans() -> None:
    """One that had ended and was not yet waited for was all that the system told of."""
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", sys.executable, "-c", _INHERIT]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    assert (result.stdout, result.stderr) == ("2 [False, False] 0 7\n", "")


def test_it_serves_reaps_what_it_inherits_and_drains(tmp_path: Path) -> None:
    with _container(tmp_path) as container, container.client() as client:
        assert _status(container.main)["NSpid"].split()[-1] == "1"
        assert _status(container.main)["Uid"].split()[0] == str(USER)
        assert client.post("/v1/completions", json={"prompt": "the dog", "max_tokens": 4}).status_code == 200
        check = [sys.executable, str(ROOT / "deploy/docker/healthcheck.py"), "/readyz", str(container.main)]
        assert subprocess.run(check, check=False).returncode == 0
        # Its own children only: the sleep of the script has ended, and somebody has waited for it.
        _until(lambda: "sleep" not in _names(container.main), lambda: str(_names(container.main)))
        assert _names(container.main)

        answers: list[str] = []
        stream = {"prompt": "the dog", "max_tokens": 40, "stream": True, "ignore_eos": True}
        began = threading.Event()

        def read() -> None:
            with container.client() as own, own.stream("POST", "/v1/completions", json=stream) as answer:
                for line in answer.iter_lines():
                    answers.append(line)
                    began.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert began.wait(_PATIENCE)
        os.kill(container.main, signal.SIGTERM)
        reader.join(_PATIENCE)
        assert answers[-2:-1] == ["data: [DONE]"] or answers[-1] == "data: [DONE]"
        assert not any('"error"' in line for line in answers)
        assert container.process.wait(_PATIENCE) == 0, container.log.read_text()
