"""scripts/install.py: what `make` does before it serves or tests."""

import ast
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pip
import pytest
from checkout import ROOT, install_script, mark_as_installed
from wheel_index import write_wheel

from ostro.sources.pypi import DEFAULT_MODEL

SCRIPT = ROOT / "scripts" / "install.py"
install = install_script()


# --- what is due ----------------------------------------------------------------------------------------------------


def run_script(*arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """In a real process that cannot reach an index: whatever is not there cannot be fetched."""
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        env=os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull} | env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_where_everything_is_installed_nothing_is_said_or_done(tmp_path: Path) -> None:
    mark_as_installed(tmp_path)
    for extra in ([], ["--serve", "--port", "9000", "./my-model"]):
        result = run_script("--venv", tmp_path, *extra)
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert [path.name for path in tmp_path.iterdir()] == ["ostro-installed.json"]


def test_what_the_tests_installed_is_enough_to_serve_but_not_the_reverse(tmp_path: Path) -> None:
    project, record = install.Project(), install.Record(tmp_path)
    record.note_packages(project, ["dev"])
    again = install.Record(tmp_path)
    assert again.has_packages(project, [])
    assert again.has_packages(project, ["dev"])
    assert not again.has_packages(project, ["dev", "eval"])
    serving = install.Record(tmp_path / "other")
    assert not serving.has_packages(project, [])


def test_a_changed_dependency_makes_packages_due(tmp_path: Path) -> None:
    project, record = install.Project(), install.Record(tmp_path)
    record.note_packages(project, [])
    project.table["project"]["dependencies"].append("another>=1")
    assert not record.has_packages(project, [])
    project.table["project"]["dependencies"].pop()
    assert record.has_packages(project, [])
    project.constraints += "another==1\n"
    assert not record.has_packages(project, [])


def test_an_extra_that_was_renamed_is_due_again(tmp_path: Path) -> None:
    project, record = install.Project(), install.Record(tmp_path)
    record.note_packages(project, ["dev"])
    optional = project.table["project"]["optional-dependencies"]
    optional["development"] = optional.pop("dev")
    assert not record.has_packages(project, ["development"])


def test_the_core_is_built_again_for_other_sources_and_once_there_is_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "cpu"
    library.mkdir()
    monkeypatch.setattr(install, "LIBRARY", library)
    project, record = install.Project(), install.Record(tmp_path)
    assert not record.has_native(project, None, "here")
    record.note_native(project, None, "here")
    assert record.has_native(project, None, "here")
    assert not record.has_native(project, "/usr/bin/c++", "here")
    record.note_native(project, "/usr/bin/c++", "here")
    assert record.has_native(project, "/usr/bin/c++", "here"), "a compiler that failed is not tried at every start"
    assert not record.has_native(project, "/usr/bin/clang++", "here")
    (library / "libostro_native.so").touch()
    record.note_native(project, "/usr/bin/c++", "here")
    # A service that starts with another PATH does not compile.
    assert record.has_native(project, None, "here")
    assert record.has_native(project, "/usr/bin/clang++", "here")
    project.native = project.native[1:]
    assert not record.has_native(project, "/usr/bin/c++", "here")


def test_the_core_is_built_again_on_another_cpu_and_for_tests_but_not_after_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "LIBRARY", tmp_path)
    (tmp_path / "libostro_native.so").touch()
    project, record, compiler = install.Project(), install.Record(tmp_path), "/usr/bin/c++"
    record.note_native(project, compiler, "here")
    due = {cpus: not record.has_native(project, compiler, cpus) for cpus in ("here", "there", install.ALL_CPUS)}
    assert due == {"here": False, "there": True, install.ALL_CPUS: True}
    record.note_native(project, compiler, install.ALL_CPUS)
    assert all(record.has_native(project, compiler, cpus) for cpus in due)
    assert install.cpu_here() == install.cpu_here() != install.ALL_CPUS


def test_an_unknown_extra_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    result = run_script("--venv", tmp_path / "venv", "--extras", "gpus")
    assert result.returncode == 1
    assert "There is no extra gpus. Choose among clients, dev, " in result.stderr
    assert not (tmp_path / "venv").exists()


def test_an_older_python_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ast.parse(SCRIPT.read_text(encoding="utf-8"), feature_version=(3, 8))
    monkeypatch.setattr(sys, "version_info", (3, 8, 10))
    assert install.main([]) == 1
    said = capsys.readouterr().err
    assert "Ostro needs Python 3.11 or later" in said
    assert "make serve PYTHON=python3.12" in said


def test_the_size_that_is_announced_is_that_of_the_default_model() -> None:
    wheels = [part.wheel_bytes for part in DEFAULT_MODEL.parts]
    assert sum(each or 0 for each in wheels) / 1e6 == pytest.approx(install.MODEL_MB, abs=0.5)


@pytest.mark.parametrize(
    ("arguments", "variables", "is_default"),
    [
        ([], {}, True),
        pytest.param(["--port", "9000", "--max-seq-len", "512"], {}, True, marks=pytest.mark.full),
        (["./my-model"], {}, False),
        pytest.param(["--models", "./models"], {}, False, marks=pytest.mark.full),
        ([], {"GCS_BUCKET": "my-models"}, False),
    ],
)
def test_the_default_model_is_fetched_only_where_it_is_served(
    arguments: list[str], variables: dict[str, str], is_default: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setitem(install.ENVIRONMENT, name, value)
    assert install.serves_default_model(install.Environment(Path(sys.prefix)), arguments) is is_default


# --- which torch ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "compiler", "built", "extras"),
    [
        (False, "/usr/bin/c++", False, []),
        (False, None, True, []),
        (True, "/usr/bin/c++", False, ["torch"]),
        (False, None, False, ["torch"]),
    ],
    ids=["native", "built before", "GPU", "no compiler"],
)
def test_torch_is_installed_where_something_here_needs_it(
    gpu: bool, compiler: str | None, built: bool, extras: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "has_nvidia_gpu", lambda: gpu)
    monkeypatch.setattr(install, "LIBRARY", tmp_path)
    if built:
        (tmp_path / "libostro_native.so").touch()
    assert install.extras_here([], compiler) == extras
    assert install.extras_here(["torch"], compiler) == ["torch"]
    assert install.wants_torch(install.Project().requirements(extras)) is bool(extras)


def test_the_tests_have_torch_and_serving_does_without() -> None:
    project = install.Project()
    assert install.wants_torch(project.requirements(["dev"]))
    assert not install.wants_torch(project.requirements([]))
    assert not install.wants_torch(["torchvision>=1", "torch-xla"])


CUDA = ('nvidia-cublas==13.1; platform_system == "Linux"', 'cuda-toolkit==13; platform_system == "Linux"')
ELSEWHERE = ('nvidia-cublas==13.1; platform_machine == "pdp11"', 'nvidia-cudnn; extra == "all"', "sympy>=1.13")


class Sources:
    """An environment that has pip and nothing else, and a directory of wheels that pip finds packages in."""

    def __init__(self, directory: Path) -> None:
        self.wheels = directory / "wheels"
        self.wheels.mkdir()
        venv = directory / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
        [site] = venv.glob("lib/python3*/site-packages")
        (site / "pip").symlink_to(Path(pip.__file__).parent)
        self.environment = install.Environment(venv)

    def add_torch(self, local: str, requires: tuple[str, ...]) -> Path:
        version = install.Project().pinned("torch") + local
        path = self.wheels / f"torch-{version}-py3-none-any.whl"
        info = f"torch-{version}.dist-info"
        lines = [
            "Metadata-Version: 2.1",
            "Name: torch",
            f"Version: {version}",
            *(f"Requires-Dist: {r}" for r in requires),
        ]
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
        return path

    def choose(self) -> object:
        return install.choose_torch(self.environment, install.Project())


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sources:
    """On a machine without a GPU."""
    made = Sources(tmp_path)
    monkeypatch.setattr(install, "has_nvidia_gpu", lambda: False)
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(made.wheels), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setitem(install.ENVIRONMENT, name, value)
    for name in ("ALLOW_CUDA", "TORCH_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    return made


@pytest.mark.full
def test_without_a_gpu_a_cuda_build_is_refused_with_what_to_set(
    sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources.add_torch("", CUDA)
    with pytest.raises(install.Failed) as refused:
        sources.choose()
    for part in ("no NVIDIA GPU", "nvidia-cublas, cuda-toolkit", "make serve TORCH_INDEX_URL=", "ALLOW_CUDA=1"):
        assert part in str(refused.value)
    monkeypatch.setenv("ALLOW_CUDA", "1")
    assert sources.choose() is not None


@pytest.mark.full
def test_with_a_gpu_it_is_taken(sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    sources.add_torch("", CUDA)
    monkeypatch.setattr(install, "has_nvidia_gpu", lambda: True)
    assert sources.choose() is not None


@pytest.mark.full
def test_a_cpu_build_is_taken_and_its_size_is_reported(sources: Sources) -> None:
    sources.add_torch("", CUDA)
    wheel = sources.add_torch("+cpu", ELSEWHERE)
    torch = sources.choose()
    assert isinstance(torch, install.Torch)
    assert torch.version.endswith("+cpu")
    assert torch.size() == wheel.stat().st_size
    assert install._size_of_packages([], torch).endswith(f"torch {torch.version} 0 MB")


@pytest.mark.full
def test_what_the_tests_add_is_said_before_it_is_fetched(sources: Sources, capsys: pytest.CaptureFixture[str]) -> None:
    """`make test` in an environment that one serves from."""
    sources.add_torch("+cpu", ())
    venv = sources.environment.directory
    [site] = venv.glob("lib/python3*/site-packages")
    # One that need not be renewed first.
    (site / "pip-99.0.dist-info").mkdir()
    project, record = install.Project(), install.Record(venv)
    record.note_packages(project, [])
    record.note_native(project, install.find_compiler(), install.ALL_CPUS)
    # There is nothing else to be had here.
    with pytest.raises(install.Failed, match="pip failed"):
        install.install(venv, ["dev"], None)
    steps, hint = capsys.readouterr().out.splitlines()[1:]
    assert steps.startswith(f"1/1 packages dev {install.EXTRAS_MB['dev']} MB + torch")
    assert "serving needs nothing of it" in hint
    assert hint.endswith("make test VENV=.venv-dev")


@pytest.mark.full
def test_pip_is_not_replaced_while_it_builds(sources: Sources) -> None:
    """The package requires pip, which is at work on the core when packages are installed."""
    write_wheel(sources.wheels, "needed", {})
    write_wheel(sources.wheels, "pip", {"pip/__init__.py": b"raise SystemExit"}, install.Project().pinned("pip"))
    install.install_packages(sources.environment, ["pip>=22.3", "needed"], None)
    assert sources.environment.version("needed") == "1.0"
    assert sources.environment.version("pip") is None


def test_sizes_are_told_by_what_they_are_for() -> None:
    serving = f"{install.PACKAGES_MB} MB"
    assert install._size_of_packages([], None) == serving
    assert install._size_of_packages(["jax", "eval"], None) == f"{serving} + jax 120 MB + eval, of unknown size"
    assert install._size_of_packages(["jax"], None, has_serving=True) == "jax 120 MB"
    assert install._size_of_packages([], None, has_serving=True) == "of other versions"


def test_a_torch_that_is_there_is_not_looked_for(sources: Sources) -> None:
    [site] = sources.environment.directory.glob("lib/python3*/site-packages")
    (site / f"torch-{install.Project().pinned('torch')}+cpu.dist-info").mkdir()
    assert sources.choose() is None


# --- nothing is left running ----------------------------------------------------------------------------------------

# Starts what starts something else, says so, and waits; as pip does with a compiler.
DRIVER = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("install", {str(SCRIPT)!r})
install = importlib.util.module_from_spec(spec)
spec.loader.exec_module(install)
install.install = lambda *_: install.run(["sh", "-c", "sleep 1000 & echo $! $$; wait"], "failed")
sys.exit(install.main([]))
"""


@pytest.fixture
def interrupted() -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """The script, waiting for a process, and the ids of that process and its child."""
    script = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert script.stdout is not None
    started = [int(each) for each in script.stdout.readline().split()]
    yield script, started
    script.kill()
    for pid in started:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    script.communicate()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_whatever_it_started(
    number: signal.Signals, interrupted: tuple[subprocess.Popen[str], list[int]]
) -> None:
    script, started = interrupted
    assert all(is_alive(pid) for pid in started)
    script.send_signal(number)
    assert script.wait(60) == 128 + number
    deadline = time.monotonic() + 60
    while any(is_alive(pid) for pid in started):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_notes_of_an_interrupted_installation_can_be_read_again(tmp_path: Path) -> None:
    (tmp_path / "ostro-installed.json").write_text('{"packages": {"": ')
    assert not install.Record(tmp_path).has_packages(install.Project(), [])
    install.Record(tmp_path).note_packages(install.Project(), [])
    assert json.loads((tmp_path / "ostro-installed.json").read_text())["packages"].keys() == {""}
