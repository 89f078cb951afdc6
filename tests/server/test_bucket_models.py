"""Models straight from a bucket, a real store behind it, in real processes."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from live_server import live_server
from model_directory import write_model
from object_stores import BUCKET, ObjectStore, running_store


def put(store: ObjectStore, name: str, directory: Path) -> None:
    store.put_model(f"models/{name}", {path.name: path.read_bytes() for path in directory.iterdir()})


@pytest.mark.parametrize("scheme", ["gs", pytest.param("s3", marks=pytest.mark.slow)])
def test_models_of_a_bucket_are_served_and_need_no_network_the_second_time(scheme: str, tmp_path: Path) -> None:
    with ExitStack() as stores:
        store = stores.enter_context(running_store("gs" if scheme == "gs" else "s3"))
        for seed, name in enumerate(("one", "org/two")):
            put(store, name, write_model(tmp_path / name, seed=seed))
        bucket = {"GCS_BUCKET": BUCKET} if scheme == "gs" else {"OSTRO_MODELS": f"s3://{BUCKET}/models/"}
        environment = {**store.environment(store.url), **bucket, "OSTRO_CACHE": str(tmp_path / "cache")}
        with live_server(tmp_path, "--threads", "1", faults="", env=environment) as live, live.client() as client:
            listed = client.get("/v1/models").json()["data"]
            assert {card["id"]: card["state"] for card in listed} == {"one": "available", "org/two": "available"}
            texts = {}
            for name in ("one", "org/two"):
                body = {"model": name, "prompt": "the dog", "max_tokens": 4, "temperature": 0}
                answer = client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                texts[name] = answer.json()["choices"][0]["text"]
            assert client.post("/admin/unload/one").json()["state"] == "available"
            # The bucket is gone, and what was fetched from it is still here.
            stores.close()
            again = client.post("/v1/completions", json={**body, "model": "one"})
            assert again.json()["choices"][0]["text"] == texts["one"]
            missing = client.post("/v1/completions", json={**body, "model": "three"})
            assert missing.status_code in (404, 502)
