"""The Kubernetes manifests: rendered, checked against Kubernetes' own schemas, and against what the server does."""

import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from checkout import ENGINE_STOP_SECONDS, ROOT, exported_metrics, known_variables, setting_variables
from dockerfile import read_dockerfile
from kustomization import Manifest, render

from ostro.devices import check_together
from ostro.server.admission.auth import METRICS_PATH, OPEN_PATHS
from ostro.server.settings import read_settings

DIRECTORY = ROOT / "deploy" / "kubernetes"
ROOTS = [".", "overlays/cpu", "overlays/gpu", "overlays/gpus", "overlays/tpu", "extended"]
# By overlay: the image, the device, and the resource that counts them.
ON_DEVICES = {
    "gpu": ("cuda", "cuda", "nvidia.com/gpu"),
    "gpus": ("cuda", "cuda", "nvidia.com/gpu"),
    "tpu": ("tpu", "tpu", "google.com/tpu"),
}
# The HPA's version 2 and pod disruption budgets are older; a pause without a shell (preStop: sleep) came last.
OLDEST, NEWEST = "1.30.0", kubernetes_validate.latest_version()
# A custom resource: its schema is the Prometheus operator's.
FOREIGN = {"ServiceMonitor"}


@pytest.fixture(scope="module", params=ROOTS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kustomization; `extended` is one as a user would write it, with every component."""
    if request.param != "extended":
        return DIRECTORY / str(request.param)
    copied = tmp_path_factory.mktemp("kubernetes") / "kubernetes"
    shutil.copytree(DIRECTORY, copied)
    extended = copied / "overlays" / "extended"
    extended.mkdir()
    components = [f"../../components/{each.name}" for each in sorted((DIRECTORY / "components").iterdir())]
    plan = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": ["../cpu"]}
    (extended / "kustomization.yaml").write_text(yaml.safe_dump(plan | {"components": components}))
    return extended


@pytest.fixture(scope="module")
def manifests(directory: Path) -> list[Manifest]:
    return render(directory)


def _only(manifests: list[Manifest], kind: str) -> Manifest:
    [found] = [each for each in manifests if each["kind"] == kind]
    return found


def _pod(manifests: list[Manifest]) -> Manifest:
    pod: Manifest = _only(manifests, "Deployment")["spec"]["template"]["spec"]
    return pod


def _container(manifests: list[Manifest]) -> Manifest:
    [container] = _pod(manifests)["containers"]
    assert isinstance(container, dict)
    return container


def _variables(manifests: list[Manifest]) -> dict[str, Any]:
    return {each["name"]: each.get("value") for each in _container(manifests)["env"]}


@pytest.mark.cases(5)
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_manifest_follows_the_schema(manifests: list[Manifest], version: str) -> None:
    kinds = [each["kind"] for each in manifests]
    assert len(kinds) >= 6
    for manifest in manifests:
        if manifest["kind"] not in FOREIGN:
            kubernetes_validate.validate(manifest, version, strict=True)


def test_kustomize_renders_the_same(directory: Path, manifests: list[Manifest]) -> None:
    if (kustomize := shutil.which("kustomize")) is None:
        pytest.skip("kustomize is not installed")
    built = subprocess.run([kustomize, "build", directory], capture_output=True, text=True, check=True)

    def by_name(manifest: Manifest) -> tuple[str, str]:
        return manifest["kind"], manifest["metadata"]["name"]

    theirs = sorted(yaml.safe_load_all(built.stdout), key=by_name)
    assert theirs == sorted(manifests, key=by_name)


def test_references_between_manifests_resolve(manifests: list[Manifest]) -> None:
    """Selectors, scale targets and ports name what is there."""
    deployment, service = _only(manifests, "Deployment"), _only(manifests, "Service")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    selectors = [deployment["spec"]["selector"]["matchLabels"], service["spec"]["selector"]]
    selectors += [
        _only(manifests, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        _only(manifests, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ]
    assert all(selector.items() <= labels.items() for selector in selectors)
    target = _only(manifests, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", deployment["metadata"]["name"])
    ports = {port["name"] for port in _container(manifests)["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    [rule] = _only(manifests, "NetworkPolicy")["spec"]["ingress"]
    assert {port["port"] for port in rule["ports"]} <= ports
    namespaces = {each["metadata"].get("namespace") for each in manifests if each["kind"] != "Namespace"}
    assert namespaces == {_only(manifests, "Namespace")["metadata"]["name"]}


def test_mounted_volumes_are_there(manifests: list[Manifest]) -> None:
    volumes = {each["name"]: each for each in _pod(manifests)["volumes"]}
    assert {each["name"] for each in _container(manifests)["volumeMounts"]} == set(volumes)
    claims = {each["metadata"]["name"] for each in manifests if each["kind"] == "PersistentVolumeClaim"}
    asked = {each["persistentVolumeClaim"]["claimName"] for each in volumes.values() if "persistentVolumeClaim" in each}
    assert asked == claims


def test_probes_ask_open_paths(manifests: list[Manifest]) -> None:
    container = _container(manifests)
    asked = {name: container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {probe["path"] for probe in asked.values()} <= OPEN_PATHS
    assert {probe["port"] for probe in asked.values()} == {"http"}
    assert asked["readinessProbe"]["path"] == "/readyz"
    # A model that loads, or an engine that restarts, is no reason to end the server.
    assert asked["livenessProbe"]["path"] == asked["startupProbe"]["path"] == "/healthz"


def test_the_port_is_the_servers(manifests: list[Manifest]) -> None:
    template = _only(manifests, "Deployment")["spec"]["template"]
    [port] = _container(manifests)["ports"]
    assert str(port["containerPort"]) == _variables(manifests)["PORT"]
    assert template["metadata"]["annotations"]["prometheus.io/port"] == _variables(manifests)["PORT"]
    assert template["metadata"]["annotations"]["prometheus.io/path"] == METRICS_PATH


def test_variables_are_known_and_services_do_not_add_any(manifests: list[Manifest]) -> None:
    """A service called ostro would come to the pod as OSTRO_PORT=tcp://..., and the server would refuse to start."""
    assert set(_variables(manifests)) <= known_variables()
    assert _pod(manifests)["enableServiceLinks"] is False


def test_requests_under_way_have_time_to_end(manifests: list[Manifest]) -> None:
    pause = _container(manifests)["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = float(_variables(manifests)["OSTRO_DRAIN_TIMEOUT"])
    readiness = _container(manifests)["readinessProbe"]["periodSeconds"]
    assert pause > readiness
    assert _pod(manifests)["terminationGracePeriodSeconds"] >= pause + drain + ENGINE_STOP_SECONDS


def test_it_runs_with_no_rights(manifests: list[Manifest]) -> None:
    pod, container = _pod(manifests), _container(manifests)
    user, _, group = read_dockerfile(ROOT / "Dockerfile").last("cpu", "USER").value.partition(":")
    assert pod["securityContext"] | {"runAsNonRoot": True, "runAsUser": int(user)} == pod["securityContext"]
    assert pod["securityContext"]["runAsGroup"] == int(group)
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {each["mountPath"] for each in container["volumeMounts"]} - {"/dev/shm"} == {"/cache", "/tmp"}
    assert "memory" in container["resources"]["limits"]
    assert {"cpu", "memory"} <= set(container["resources"]["requests"])


def test_images_are_the_dockerfiles_targets(directory: Path, manifests: list[Manifest]) -> None:
    name, _, target = _container(manifests)["image"].partition(":")
    assert name == "ostro"
    image, device, resource = ON_DEVICES.get(directory.name, ("cpu", None, None))
    assert target == image
    assert target in read_dockerfile(ROOT / "Dockerfile").stages
    counted = set(_container(manifests)["resources"]["limits"]) - {"cpu", "memory"}
    assert counted == ({resource} if resource else set())
    assert _variables(manifests).get("OSTRO_DEVICE") == device


@pytest.mark.parametrize("directory", [f"overlays/{name}" for name in ON_DEVICES], indirect=True)
def test_a_model_is_divided_over_all_devices_of_its_pod(directory: Path, manifests: list[Manifest]) -> None:
    _, _, resource = ON_DEVICES[directory.name]
    devices = _container(manifests)["resources"]["limits"][resource]
    assert _variables(manifests).get("OSTRO_TENSOR_PARALLEL", "1") in (devices, "auto")


@pytest.mark.parametrize("directory", ["overlays/tpu"], indirect=True)
def test_a_topology_has_as_many_chips_as_are_requested(manifests: list[Manifest]) -> None:
    selected = _pod(manifests)["nodeSelector"]
    assert selected.keys() == {"cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology"}
    chips = math.prod(map(int, selected["cloud.google.com/gke-tpu-topology"].split("x")))
    assert _container(manifests)["resources"]["limits"]["google.com/tpu"] == str(chips)


def test_the_settings_of_its_pods_go_together(
    manifests: list[Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in setting_variables():
        monkeypatch.delenv(name, raising=False)
    for name, value in _variables(manifests).items():
        if value is not None:
            monkeypatch.setenv(name, value)
    check_together(read_settings({}, directory=tmp_path).settings.engine())


@pytest.mark.parametrize("directory", ["overlays/gpus"], indirect=True)
def test_ranks_share_memory_that_lies_in_memory(manifests: list[Manifest]) -> None:
    [mount] = [each for each in _container(manifests)["volumeMounts"] if each["mountPath"] == "/dev/shm"]
    [volume] = [each for each in _pod(manifests)["volumes"] if each["name"] == mount["name"]]
    assert volume["emptyDir"]["medium"] == "Memory"
    assert "sizeLimit" in volume["emptyDir"]


def test_a_node_with_the_only_pod_can_be_drained(manifests: list[Manifest]) -> None:
    assert _only(manifests, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    assert "replicas" not in _only(manifests, "Deployment")["spec"]


def test_the_autoscaler_asks_for_metrics_that_the_server_exports(manifests: list[Manifest]) -> None:
    metrics = _only(manifests, "HorizontalPodAutoscaler")["spec"]["metrics"]
    values = yaml.safe_load((DIRECTORY / "components/monitoring/prometheus-adapter.yaml").read_text(encoding="utf-8"))
    rules = values["rules"]["custom"]
    assert [each["pods"]["metric"]["name"] for each in metrics] == [rule["name"]["as"] for rule in rules]
    assert {rule["name"]["matches"] for rule in rules} == {"vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"}
    for rule in rules:
        series = re.search(r'__name__="([^"]+)"', rule["seriesQuery"])
        assert series is not None
        assert series[1] == rule["name"]["matches"]
        assert series[1] in exported_metrics()
        assert rule["name"]["as"] == series[1].replace(":", "_")


def test_the_example_secret_has_the_keys_that_are_read() -> None:
    secret = yaml.safe_load((DIRECTORY / "secret.example.yaml").read_text(encoding="utf-8"))
    kubernetes_validate.validate(secret, NEWEST, strict=True)
    container = _container(render(DIRECTORY))
    read = {each["valueFrom"]["secretKeyRef"]["key"] for each in container["env"] if "valueFrom" in each}
    assert set(secret["stringData"]) <= read
    names = {each["valueFrom"]["secretKeyRef"]["name"] for each in container["env"] if "valueFrom" in each}
    assert names == {secret["metadata"]["name"]}
