"""deploy/cloudrun/cloudbuild.yaml: its steps are run, with stand-ins for docker and gcloud that note what they get."""

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkout import ROOT, known_variables
from dockerfile import read_dockerfile

BUILD: dict[str, Any] = yaml.safe_load((ROOT / "deploy/cloudrun/cloudbuild.yaml").read_text(encoding="utf-8"))
BUILT_IN = {"BUILD_ID": "b1", "PROJECT_ID": "p"}
GIVEN = {"_IMAGE": "registry/ostro", "_BUCKET": "my-models"}


def substituted(text: str, values: dict[str, str]) -> str:
    """As Cloud Build does it: $NAME and ${NAME} of the known, $$ for a dollar sign."""

    def value(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return values[found[1] or found[2]]

    return re.sub(r"\$\$|\$(_?[A-Z][A-Z_]*)|\$\{(_?[A-Z][A-Z_]*)\}", value, text)


def run(tmp_path: Path, **changes: str) -> tuple[int, str, dict[str, list[str]]]:
    """The exit status and complaints of the steps, and by `docker build`, `docker push`, … the words of each."""
    values = BUILT_IN | BUILD["substitutions"] | GIVEN | changes
    calls = tmp_path / "calls"
    calls.write_text("")
    for name in ("docker", "gcloud"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\n{{ echo {name} "$@"; }} >>{shlex.quote(str(calls))}\n')
        program.chmod(0o755)
    status, complaints = 0, ""
    for step in BUILD["steps"]:
        command = [step["entrypoint"], *(substituted(each, values) for each in step["args"])]
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        status, complaints = ran.returncode, complaints + ran.stderr
        if status:
            break
    words = [line.split() for line in calls.read_text().splitlines()]
    return status, complaints, {" ".join(each[:2]): each for each in words}


def after(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


@pytest.mark.parametrize(("gpu", "target", "device"), [("1", "cuda", "cuda"), ("0", "cpu", "cpu")])
def test_the_substitution_chooses_image_and_machine(tmp_path: Path, gpu: str, target: str, device: str) -> None:
    status, complaints, calls = run(tmp_path, _GPU=gpu)
    assert (status, complaints) == (0, "")
    assert after(calls["docker build"], "--target") == target
    assert target in read_dockerfile(ROOT / "Dockerfile").stages
    deployed = calls["gcloud run"]
    assert ("--gpu" in deployed) == (gpu == "1")
    image = after(calls["docker build"], "--tag")
    assert image == after(deployed, "--image") == calls["docker push"][-1] == "registry/ostro:b1"
    variables = dict(pair.split("=", 1) for pair in after(deployed, "--set-env-vars").split(","))
    assert variables["OSTRO_DEVICE"] == device
    assert variables["GCS_BUCKET"] == "my-models"
    assert set(variables) <= known_variables()


def test_it_deploys_what_the_service_file_says(tmp_path: Path) -> None:
    _, _, calls = run(tmp_path)
    deployed = calls["gcloud run"]
    service = yaml.safe_load((ROOT / "deploy/cloudrun/service.yaml").read_text(encoding="utf-8"))
    template = service["spec"]["template"]["spec"]
    [container] = template["containers"]
    expected = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    variables = dict(pair.split("=", 1) for pair in after(deployed, "--set-env-vars").split(","))
    # The default of the prefix, which the file shows.
    assert expected.pop("GCS_MODEL_PREFIX") == "models/"
    assert variables == expected | {"GCS_BUCKET": "my-models"}
    assert after(deployed, "--concurrency") == str(template["containerConcurrency"])
    assert after(deployed, "--timeout") == str(template["timeoutSeconds"])
    assert after(deployed, "--memory") == container["resources"]["limits"]["memory"]
    assert after(deployed, "--port") == str(container["ports"][0]["containerPort"])


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"_BUCKET": ""}, "Name the image and the bucket"),
        ({"_IMAGE": ""}, "Name the image and the bucket"),
        ({"_GPU": "yes"}, "_GPU must be 0 or 1, got yes"),
    ],
)
def test_what_is_missing_is_named_before_anything_is_built(
    tmp_path: Path, changes: dict[str, str], complaint: str
) -> None:
    status, complaints, calls = run(tmp_path, **changes)
    assert (status, calls) == (1, {})
    assert complaint in complaints


def test_every_substitution_is_used() -> None:
    scripts = "\n".join(word for step in BUILD["steps"] for word in step["args"])
    assert {name for name in BUILD["substitutions"] if f"${name}" not in scripts} == set()
