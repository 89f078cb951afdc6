"""Which command installs an extra: one that works from a clone and one that works from a wheel."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from checkout import ROOT
from dockerfile import read_dockerfile

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
SAY = "from ostro.system.requirements import install_command; print(install_command('ray'))"


def said(package: Path, cwd: Path) -> str:
    command = [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(package)!r}); {SAY}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd).stdout.strip()


def test_in_a_clone_it_names_the_clone(tmp_path: Path) -> None:
    assert said(ROOT / "src", ROOT) == "pip install -e '.[ray]'"
    assert said(ROOT / "src", tmp_path) == f"pip install -e '{ROOT}[ray]'"


def test_from_a_wheel_it_names_the_package(tmp_path: Path) -> None:
    package = tmp_path / "lib" / "python3" / "site-packages" / "ostro"
    (package / "system").mkdir(parents=True)
    for file in ("__init__.py", "errors.py", "system/__init__.py", "system/requirements.py"):
        text = "" if file == "__init__.py" else (ROOT / "src" / "ostro" / file).read_text()
        (package / file).write_text(text)
    assert said(package.parent, tmp_path) == "pip install 'ostro[ray]'"


@pytest.mark.parametrize(
    ("extra", "how"),
    [
        ("torch", "Use the Dockerfile's target hrm-serve, or cuda for a GPU."),
        ("jax", "Use the Dockerfile's target tpu."),
        ("ray", "Build it with ray among its argument EXTRAS."),
    ],
)
def test_in_an_image_it_names_another_image(extra: str, how: str, tmp_path: Path) -> None:
    """`pip install` in a container is gone with it, and an image's user cannot write there."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "ostro-image").touch()
    say = f"from ostro.system.requirements import needs; print(needs('A model', {extra!r}))"
    program = f"import sys; sys.prefix = {str(tmp_path)!r}; sys.path.insert(0, {str(ROOT / 'src')!r}); {say}"
    ran = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == f"A model needs libraries that this image does not have. {how}\n"
    stages = read_dockerfile(ROOT / "Dockerfile").stages
    assert set(re.findall(r"target ([\w-]+)(?:, or (\w+))?", how)[0] if "target" in how else []) - {""} <= stages.keys()
    assert any("etc/ostro-image" in each.value for each in stages["build"].all("RUN"))


def test_every_extra_that_an_error_names_exists() -> None:
    sources = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    named = {extra for text in sources for extra in re.findall(r'needs\(f?"[^"]+", "([\w-]+)"\)', text)}
    assert {"eval", "gcs", "levanter", "otel", "ray", "s3"} <= named <= EXTRAS.keys()


@pytest.mark.full
@pytest.mark.parametrize(
    ("module", "library", "extra"), [("ostro.evaluation", "lm_eval", "eval"), ("ostro.ray.application", "ray", "ray")]
)
def test_a_module_whose_libraries_are_missing_says_what_to_install(module: str, library: str, extra: str) -> None:
    script = f"import sys; sys.modules[{library!r}] = None; import {module}"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    name = module.removesuffix(".application")
    message = f"{name} needs libraries that are not installed. Run: pip install -e '.[{extra}]'"
    assert ran.stderr.splitlines()[-1] == f"ImportError: {message}"
