"""The Cloud Run service, against what Cloud Run documents, as its schema is not to be had, and what the server does."""

from typing import Any

import yaml
from checkout import ROOT, known_variables

from ostro.server.admission.auth import OPEN_PATHS

SERVICE: dict[str, Any] = yaml.safe_load((ROOT / "deploy/cloudrun/service.yaml").read_text(encoding="utf-8"))
TEMPLATE = SERVICE["spec"]["template"]["spec"]
[CONTAINER] = TEMPLATE["containers"]
VARIABLES = {each["name"]: each.get("value") for each in CONTAINER["env"]}
# What instances get between SIGTERM and SIGKILL, and the longest that a startup probe may wait in all.
SIGTERM_SECONDS, STARTUP_SECONDS = 10, 240


def test_it_is_a_service_with_one_gpu() -> None:
    assert (SERVICE["apiVersion"], SERVICE["kind"]) == ("serving.knative.dev/v1", "Service")
    assert TEMPLATE["nodeSelector"] == {"run.googleapis.com/accelerator": "nvidia-l4"}
    limits = CONTAINER["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == "1"
    # The least that goes with an L4.
    assert int(limits["cpu"]) >= 4
    assert int(limits["memory"].removesuffix("Gi")) >= 16
    annotations = SERVICE["spec"]["template"]["metadata"]["annotations"]
    assert annotations["run.googleapis.com/cpu-throttling"] == "false"
    assert VARIABLES["OSTRO_DEVICE"] == "cuda"


def test_annotations_are_texts() -> None:
    for metadata in (SERVICE["metadata"], SERVICE["spec"]["template"]["metadata"]):
        assert all(isinstance(value, str) for value in metadata["annotations"].values())


def test_variables_are_known_and_the_port_is_left_to_cloud_run() -> None:
    assert set(VARIABLES) <= known_variables()
    assert "PORT" not in VARIABLES
    assert "OSTRO_PORT" not in VARIABLES
    assert all(isinstance(value, str | None) for value in VARIABLES.values())


def test_requests_end_within_the_signals_window() -> None:
    # An idle engine ends at once; a second is left for the last bytes.
    assert float(str(VARIABLES["OSTRO_DRAIN_TIMEOUT"])) <= SIGTERM_SECONDS - 1


def test_the_server_gives_up_before_cloud_run_does() -> None:
    assert float(str(VARIABLES["REQUEST_TIMEOUT"])) < TEMPLATE["timeoutSeconds"] <= 3600


def test_an_instance_takes_what_it_is_sent() -> None:
    assert int(str(VARIABLES["MAX_CONCURRENT_REQUESTS"])) >= TEMPLATE["containerConcurrency"]


def test_probes_ask_open_paths_on_the_port() -> None:
    [port] = CONTAINER["ports"]
    for name in ("startupProbe", "livenessProbe"):
        asked = CONTAINER[name]["httpGet"]
        assert asked["path"] in OPEN_PATHS
        assert asked["port"] == port["containerPort"]
        assert CONTAINER[name]["timeoutSeconds"] <= CONTAINER[name]["periodSeconds"]
    startup = CONTAINER["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] <= STARTUP_SECONDS


def test_the_cache_leaves_room_in_memory() -> None:
    """Files of an instance lie in its memory."""
    cache = int(str(VARIABLES["OSTRO_CACHE_LIMIT"]).removesuffix("G"))
    assert cache < int(CONTAINER["resources"]["limits"]["memory"].removesuffix("Gi")) / 2
