"""Settings of a cluster, from arguments and the environment."""

from pathlib import Path

import pytest
from doc_pages import tables

from ostro.errors import BadRequest
from ostro.ray.options import RayOptions, devices_of, explicit, goes_direct, hard_stop_seconds, read_options, threads_of
from ostro.server.settings import read_settings


def test_arguments_are_settings_of_the_server_or_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTRO_RAY_MAX_REPLICAS", "4")
    monkeypatch.setenv("OSTRO_MAX_SEQ_LEN", "128")
    options, merged = read_options({"replicas": "2", "model": "./model", "kv_memory": "64M"})
    assert (options.replicas, options.max_replicas) == (2, 4)
    assert merged.settings.model == ("./model",)
    assert (merged.settings.engine().kv_memory, merged.settings.engine().max_seq_len) == (64 << 20, 128)


def test_a_cluster_variable_that_is_not_a_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTRO_RAY_HEAD_SVC_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("OSTRO_RAY_HEAD_SVC_PORT", "tcp://10.0.0.1:8000")
    read_options({})
    monkeypatch.setenv("OSTRO_RAY_MAX_REPLICA", "4")
    with pytest.raises(BadRequest, match=r"^OSTRO_RAY_MAX_REPLICA in .*\. Did you mean OSTRO_RAY_MAX_REPLICAS\?$"):
        read_options({})


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"replica": "2"}, "replica is not a setting. Did you mean replicas?"),
        ({"replicas": "none"}, "replicas"),
        ({"replicas": "3", "max_replicas": "2"}, "max_replicas must not be lower than replicas"),
        ({"replicas": "2", "target_requests": "4"}, "without it target_requests would do nothing"),
        ({"routing": "luck"}, "routing"),
        ({"trust_remote_code": "true"}, "is not supported"),
        ({"kv_memory": "much"}, "kv_memory"),
    ],
)
def test_wrong_setting_is_refused_by_name(args: dict[str, object], told: str) -> None:
    with pytest.raises(BadRequest, match=told):
        read_options(args)


@pytest.mark.parametrize(
    ("args", "gpus", "tpus", "threads"),
    [
        ({}, 0, {}, 1),
        ({"device": "cuda"}, 1, {}, 1),
        ({"device": "cuda", "gpus": "0.5", "cpus": "3"}, 0.5, {}, 3),
        ({"device": "cuda", "backend": "jax", "tensor_parallel": "4"}, 4, {}, None),
        ({"device": "tpu", "tensor_parallel": "4"}, 0, {"TPU": 4}, None),
        ({"device": "cuda", "tensor_parallel": "auto", "gpus": "4"}, 4, {}, 1),
        ({"device": "cpu", "tensor_parallel": "auto"}, 0, {}, 1),
    ],
)
def test_replica_reserves_every_device_of_its_model(
    args: dict[str, object], gpus: float, tpus: dict[str, float], threads: int | None
) -> None:
    options, merged = read_options(args)
    assert devices_of(options, merged.settings) == {"num_gpus": gpus, "resources": tpus}
    # JAX refuses a number of threads.
    assert threads_of(options, merged.settings) == threads


def test_fewer_gpus_than_a_model_is_divided_over_are_refused() -> None:
    options, merged = read_options({"device": "cuda", "backend": "jax", "tensor_parallel": "4", "gpus": "2"})
    with pytest.raises(BadRequest, match="divided over 4 GPUs needs as many"):
        devices_of(options, merged.settings)


@pytest.mark.parametrize("device", ["cuda", "tpu"])
def test_a_number_of_devices_that_ray_cannot_know_is_refused(device: str) -> None:
    options, merged = read_options({"device": device, "backend": "jax", "tensor_parallel": "auto"})
    with pytest.raises(BadRequest, match=r"tensor_parallel is auto.*Set it to their number"):
        devices_of(options, merged.settings)


def test_replicas_work_out_for_themselves_what_nobody_said(tmp_path: Path) -> None:
    config = tmp_path / "ostro.yaml"
    config.write_text("models: ./models\nport: 9000\n")
    _, merged = read_options({"config": str(config), "api_key": "a,b"})
    assert merged.settings.memory_budget is not None
    given = explicit(merged)
    assert given.keys() == {"models", "port", "api_key"}
    there = read_settings(given).settings
    assert (there.models, there.keyring()) == (("./models",), merged.settings.keyring())


def test_docs_list_every_setting_of_the_cluster() -> None:
    page = Path(__file__).parents[2] / "docs" / "ray.md"
    [table] = [table for table in tables(page) if table.head[0] == "setting"]
    assert [row[0].strip("`") for row in table.rows] == list(RayOptions.model_fields)


DIRECT = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
}


def test_direct_path_is_taken_where_haproxy_is_and_refused_where_it_lacks_something() -> None:
    plain, _ = read_options({})
    assert not goes_direct(plain, {})
    assert goes_direct(plain, DIRECT)
    for name in list(DIRECT)[1:]:
        with pytest.raises(BadRequest, match=f"set {name}="):
            goes_direct(plain, {**DIRECT, name: "wrong"})
    without_body = {name: value for name, value in DIRECT.items() if not name.endswith("FORWARD_BODY")}
    assert goes_direct(read_options({"routing": "round_robin"})[0], without_body)
    with pytest.raises(BadRequest, match="ingress_replicas would do nothing"):
        goes_direct(read_options({"ingress_replicas": "2"})[0], DIRECT)


def test_streams_outlive_a_change_of_replicas_as_long_as_ray_says() -> None:
    assert hard_stop_seconds({}) == 120
    assert hard_stop_seconds({"RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "600"}) == 600
