"""The workflow that makes releases: rehearsed job by job, and held to publish nothing before it is switched on."""

import hashlib
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkout import ROOT
from workflow_run import WorkflowRun

from check_distributions import PLATFORMS, VERSION
from release_notes import notes

WORKFLOW: dict[Any, Any] = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
JOBS: dict[str, dict[str, Any]] = WORKFLOW["jobs"]
PUBLISHING = ["attest", "pypi", "image", "image-index", "release"]
WHEELS = {
    "ubuntu-24.04": "manylinux_2_28_x86_64",
    "ubuntu-24.04-arm": "manylinux_2_28_aarch64",
    "macos-15": "macosx_11_0_arm64",
    "macos-15-intel": "macosx_11_0_x86_64",
}
FILES = {f"ostro-{VERSION}-py3-none-{platform}.whl" for platform in WHEELS.values()} | {f"ostro-{VERSION}.tar.gz"}
STAND_INS = {
    "make": "mkdir -p build/release && echo '{}' > build/release/ostro.cdx.json",
    "gh": "",
    "curl": 'echo \'{"content": "Paris"}\'',
    # A build's digest is of where it was built.
    "docker": """
case " $* " in
  *" --password-stdin "*) cat > /dev/null ;;
  *" --metadata-file "*)
    printf '{"containerimage.digest": "sha256:%s"}' "$(pwd | sha256sum | cut -c -64)" > metadata.json ;;
  *" inspect "*) echo '{"digest": "sha256:0123"}' ;;
esac""",
}


def started(directory: Path, *, publish: str = "", ref_type: str = "tag", ref_name: str = f"v{VERSION}") -> WorkflowRun:
    """A run whose wheels are built already."""
    github = {
        "actor": "maintainer",
        "ref_name": ref_name,
        "ref_type": ref_type,
        "repository": "Owner/Ostro",
        "server_url": "https://example",
        "sha": "c0ffee",
        "token": "secret",
    }
    run = WorkflowRun(WORKFLOW, directory, github, {"PUBLISH": publish}, STAND_INS)
    for machine, platform in WHEELS.items():
        folder = run.artifacts / f"wheel-{machine}"
        folder.mkdir(parents=True)
        (folder / f"ostro-{VERSION}-py3-none-{platform}.whl").write_text(platform)
    (run.artifacts / "sdist").mkdir()
    (run.artifacts / "sdist" / f"ostro-{VERSION}.tar.gz").write_text("source")
    return run


def finish(run: WorkflowRun) -> WorkflowRun:
    for name in JOBS:
        if name == "wheels":
            run.jobs.append(name)
        else:
            run.run(name)
    return run


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> WorkflowRun:
    return finish(started(tmp_path_factory.mktemp("release"), publish="true"))


@pytest.mark.parametrize(
    ("publish", "ref_type"), [("", "tag"), ("false", "tag"), ("true", "branch")], ids=["unset", "off", "by hand"]
)
def test_nothing_is_published_before_it_is_switched_on(publish: str, ref_type: str, tmp_path: Path) -> None:
    ref_name = f"v{VERSION}" if ref_type == "tag" else "main"
    run = finish(started(tmp_path, publish=publish, ref_type=ref_type, ref_name=ref_name))
    assert run.jobs == ["notes", "wheels", "check"]
    assert run.published == []
    assert {call.split()[0] for call in run.calls} == {"make"}


def test_all_that_may_write_waits_for_the_switch() -> None:
    writing = [name for name, job in JOBS.items() if "write" in job.get("permissions", {}).values()]
    assert writing == PUBLISHING
    assert {JOBS[name].get("if") for name in writing} == {"vars.PUBLISH == 'true' && github.ref_type == 'tag'"}
    assert {name for name, job in JOBS.items() if "environment" in job} == {"pypi"}


def test_a_switched_on_tag_runs_every_job_and_the_release_is_the_last(release: WorkflowRun) -> None:
    assert release.jobs == list(JOBS)
    assert release.jobs[-1] == "release"


def test_what_is_checked_is_what_is_published(release: WorkflowRun) -> None:
    assert "make check-release ARGS=--complete" in release.calls
    [uploaded] = [each for each in release.published if each.action == "pypa/gh-action-pypi-publish"]
    assert {Path(each).name for each in uploaded.files} == FILES
    assert JOBS["pypi"]["permissions"] == {"id-token": "write"}
    assert "password" not in uploaded.inputs


def test_files_and_image_are_attested(release: WorkflowRun) -> None:
    built, contents, image = (each for each in release.published if each.action == "actions/attest")
    assert {Path(each).name for each in built.files} == FILES
    assert "ostro.cdx.json" in contents.files
    assert {Path(each).name for each in contents.files} - {"ostro.cdx.json"} == {
        each for each in FILES if each.endswith(".whl")
    }
    assert (image.inputs["subject-name"], image.inputs["subject-digest"]) == ("ghcr.io/owner/ostro", "sha256:0123")


def test_an_image_is_tried_before_it_is_pushed_and_has_one_name_for_all_architectures(release: WorkflowRun) -> None:
    docker = [shlex.split(call) for call in release.calls if call.startswith("docker")]
    tried, pushed = (
        next(at for at, words in enumerate(docker) if option in " ".join(words))
        for option in ("run --detach", "push=true")
    )
    assert tried < pushed
    machines = JOBS["image"]["strategy"]["matrix"]["machine"]
    digests = [
        hashlib.sha256(f"{release.directory / 'jobs' / f'image {machine}'}\n".encode()).hexdigest()
        for machine in machines
    ]
    [named] = [words for words in docker if "create" in words and "imagetools" in words]
    image = "ghcr.io/owner/ostro"
    assert named[4:] == [
        *("--tag", f"{image}:{VERSION}", "--tag", f"{image}:latest"),
        *sorted(f"{image}@sha256:{digest}" for digest in digests),
    ]


def test_a_release_has_the_notes_and_every_file(release: WorkflowRun) -> None:
    [words] = [shlex.split(call) for call in release.calls if call.startswith("gh")]
    assert words[1:5] == ["release", "create", f"v{VERSION}", "--verify-tag"]
    assert {f"dist/{name}" for name in FILES} | {"ostro.cdx.json"} <= set(words)
    assert "--prerelease" not in words
    written = (release.directory / "jobs" / "release" / "notes.md").read_text(encoding="utf-8")
    assert written.strip() == notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), VERSION)


def test_a_pre_release_is_called_one_and_is_not_the_latest_image(tmp_path: Path) -> None:
    run = started(tmp_path, publish="true", ref_name="v1.0.0rc1")
    run.jobs += ["notes", "wheels", "check", "attest", "pypi"]
    for artifact, file in (("notes", "notes.md"), ("sbom", "ostro.cdx.json")):
        (run.artifacts / artifact).mkdir()
        (run.artifacts / artifact / file).write_text("{}")
    for name in ("image", "image-index", "release"):
        run.run(name)
    [named] = [call for call in run.calls if "imagetools create" in call]
    assert "ostro:1.0.0rc1 " in named
    assert "latest" not in named
    [created] = [call for call in run.calls if call.startswith("gh")]
    assert "--prerelease" in created


def test_every_platform_has_a_machine_that_builds_its_wheel() -> None:
    wheels = yaml.safe_load((ROOT / ".github/workflows/wheels.yml").read_text(encoding="utf-8"))
    assert set(wheels["jobs"]["wheel"]["strategy"]["matrix"]["machine"]) == WHEELS.keys()
    assert len(PLATFORMS) == len(WHEELS)
