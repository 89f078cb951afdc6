"""The compose files: what `docker compose config` says of them where it is installed, and what they must agree with."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkout import ENGINE_STOP_SECONDS, ROOT, known_variables
from dockerfile import read_dockerfile

from ostro.server.admission.auth import METRICS_PATH, OPEN_PATHS
from ostro.server.settings import ALIASES, check_environment

COMPOSE, GPU = (
    yaml.safe_load((ROOT / name).read_text(encoding="utf-8")) for name in ("compose.yaml", "compose.gpu.yaml")
)
SERVER: dict[str, Any] = COMPOSE["services"]["ostro"]
DRAIN: str = SERVER["environment"]["OSTRO_DRAIN_TIMEOUT"]


def _seconds(text: str) -> int:
    match = re.fullmatch(r"(\d+)s", text)
    assert match is not None
    return int(match[1])


def _compose_command() -> list[str]:
    """Docker Compose 2; the Python program of the same name reads another dialect."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) is None:
            continue
        version = subprocess.run([*command, "version", "--short"], capture_output=True, text=True, check=False)
        if re.match(r"v?([2-9]|\d\d)\.", version.stdout):
            return command
    pytest.skip("Docker Compose 2 is not installed")


@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.yaml", "compose.gpu.yaml"]])
def test_docker_compose_reads_them(files: list[str]) -> None:
    given = [word for name in files for word in ("-f", str(ROOT / name))]
    command = [*_compose_command(), *given, "--profile", "monitoring", "config", "--format", "json"]
    environment = {"PATH": os.environ["PATH"], "OSTRO_API_KEY": "secret"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    read = json.loads(result.stdout)["services"]
    assert set(read) == {"ostro", "prometheus", "grafana"}
    assert read["ostro"]["environment"]["OSTRO_API_KEY"] == "secret"
    # A variable that is set to nothing would be one that somebody has set.
    assert read["ostro"]["environment"].get("OSTRO_MODEL") is None
    assert read["ostro"]["build"]["target"] == ("cpu" if len(files) == 1 else "cuda")
    assert ("deploy" in read["ostro"]) == (len(files) == 2)


def test_targets_are_the_dockerfiles() -> None:
    stages = read_dockerfile(ROOT / "Dockerfile").stages
    assert COMPOSE["services"]["ostro"]["build"]["target"] == "${IMAGE_TARGET:-cpu}"
    assert "cpu" in stages
    assert GPU["services"]["ostro"]["build"]["target"] in stages
    for services in (COMPOSE["services"], GPU["services"]):
        assert services["ostro"]["image"] == f"ostro:{services['ostro']['build']['target']}"


def test_ports_are_published_on_this_machine_alone() -> None:
    published = [port for service in COMPOSE["services"].values() for port in service.get("ports", [])]
    assert len(published) == 3
    assert all(port.startswith("127.0.0.1:") for port in published)
    [port] = SERVER["ports"]
    assert port.endswith(":" + SERVER["environment"]["OSTRO_PORT"])


def test_the_port_of_a_dotenv_file_is_the_one_that_is_published() -> None:
    """Within the container it is always the same one: the file is one for servers outside, too."""
    [port] = SERVER["ports"]
    assert port.partition(":")[2] == "${OSTRO_PUBLISHED_PORT:-${OSTRO_PORT:-${PORT:-8000}}}:8000"
    assert {name: value for name, value in SERVER["environment"].items() if value} == {
        "OSTRO_ALLOWED_HOSTS": "${OSTRO_ALLOWED_HOSTS:-ostro}",
        "OSTRO_DRAIN_TIMEOUT": DRAIN,
        "OSTRO_HOST": "0.0.0.0",
        "OSTRO_PORT": "8000",
        "OSTRO_CACHE": "/cache/ostro",
    }


def test_settings_of_other_servers_reach_the_server() -> None:
    passed = {name for name, value in SERVER["environment"].items() if value is None}
    theirs = {name for names in ALIASES.values() for name in names.foreign} - {"PORT"}
    assert theirs <= passed
    # All else by the file itself.
    assert SERVER["env_file"] == [{"path": ".env", "required": False}]


def test_variables_are_known() -> None:
    assert set(SERVER["environment"]) <= known_variables()


def test_a_dotenv_file_with_any_variable_of_the_file_is_taken_by_the_server() -> None:
    named = set(re.findall(r"\bOSTRO_\w+", (ROOT / "compose.yaml").read_text(encoding="utf-8")))
    assert "OSTRO_MODELS_DIR" in named
    check_environment(named)


def test_what_a_dotenv_file_may_set_is_not_overridden() -> None:
    """But for what the container itself fixes: where it listens, and where its volume is."""
    fixed = {name for name, value in SERVER["environment"].items() if value and not value.startswith(f"${{{name}:-")}
    assert fixed == {"OSTRO_HOST", "OSTRO_PORT", "OSTRO_CACHE"}


def test_requests_under_way_have_time_to_end() -> None:
    drain = float(DRAIN.removeprefix("${OSTRO_DRAIN_TIMEOUT:-").removesuffix("}"))
    assert _seconds(SERVER["stop_grace_period"]) >= drain + ENGINE_STOP_SECONDS


def test_health_is_readiness() -> None:
    *command, path = SERVER["healthcheck"]["test"]
    assert path == "/readyz"
    assert path in OPEN_PATHS
    assert command == ["CMD", *read_dockerfile(ROOT / "Dockerfile").last("cpu", "HEALTHCHECK").words[:-1]]


def test_it_writes_to_its_volumes_alone() -> None:
    assert SERVER["read_only"] is True
    assert SERVER["tmpfs"] == ["/tmp"]
    assert SERVER["volumes"] == ["cache:/cache", "${OSTRO_MODELS_DIR:-./models}:/models:ro"]
    assert SERVER["cap_drop"] == ["ALL"]


def test_mounted_files_and_volumes_exist() -> None:
    for service in COMPOSE["services"].values():
        for mount in service.get("volumes", []):
            source, _, _ = mount.partition(":")
            if source.startswith("${"):
                # The user's own; Docker makes it where it is missing.
                continue
            if source.startswith("./"):
                assert (ROOT / source).exists(), source
            else:
                assert source in COMPOSE["volumes"]


def test_images_of_others_are_pinned() -> None:
    foreign = [each["image"] for each in COMPOSE["services"].values() if "build" not in each]
    assert foreign
    assert all(re.search(r":v?\d+\.\d+\.\d+$", image) for image in foreign)


def test_prometheus_asks_the_server_as_its_own_configuration_does() -> None:
    """All but the address, and the key."""
    content = COMPOSE["configs"]["prometheus"]["content"]
    ours = yaml.safe_load(content)
    standard = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8"))
    [job], [its] = ours.pop("scrape_configs"), standard.pop("scrape_configs")
    assert ours == standard
    assert job["job_name"] == its["job_name"]
    [targets] = [each["targets"] for each in job["static_configs"]]
    assert targets == ["ostro:" + SERVER["environment"]["OSTRO_PORT"]]
    assert job.get("metrics_path", "/metrics") == METRICS_PATH
    # With an admin key alone, metrics ask for a key too.
    assert job["authorization"] == {"credentials": "${OSTRO_API_KEY:-${OSTRO_ADMIN_KEY:-none}}"}


def test_grafana_finds_its_board_where_it_is_mounted() -> None:
    [provider] = yaml.safe_load(COMPOSE["configs"]["grafana-dashboards"]["content"])["providers"]
    places = [mount.split(":")[1] for mount in COMPOSE["services"]["grafana"]["volumes"]]
    assert any(Path(place).parent == Path(provider["options"]["path"]) for place in places)
    [source] = yaml.safe_load(COMPOSE["configs"]["grafana-datasource"]["content"])["datasources"]
    assert source["url"] == "http://prometheus:9090"


def test_monitoring_is_asked_for_by_name() -> None:
    assert {name for name, each in COMPOSE["services"].items() if not each.get("profiles")} == {"ostro"}


def test_settings_beside_the_file_are_not_sent_to_the_builder() -> None:
    """`.env` may hold keys."""
    assert not any(line in ("!.env", "!*") for line in Path(ROOT / ".dockerignore").read_text().splitlines())
