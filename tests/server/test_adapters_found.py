"""Adapters beside a base under a root: served under their own names from one engine, with one copy of the base."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest
import torch
from live_server import live_server
from model_directory import write_model
from object_stores import BUCKET, running_store
from peft_directory import peft_config, random_adapter

from ostro import LLM, SamplingParams
from ostro.config import EngineConfig
from ostro.server.models.build import build_models
from ostro.server.models.served import Models
from ostro.server.settings import read_settings
from ostro.sources.store import Entry, ModelStore
from ostro.torch_models.build import build_model

PROMPT = "the quick"


def make_adapter(directory: Path, base: Path, seed: int, *, says: str | None = None) -> Path:
    shape = build_model(json.loads((base / "config.json").read_text()), dtype=torch.float32)
    return random_adapter(directory, shape, seed=seed, base=says)


def make_root(root: Path) -> Path:
    """A base with three adapters, one with the adapter in it, and one that lies beside its adapter."""
    alpha, own, pair = (
        write_model(root / name, seed=seed) for seed, name in enumerate(("alpha", "own", "pair/base_model"))
    )
    make_adapter(root / "french", alpha, 1, says="/train/alpha")
    make_adapter(root / "org/german", alpha, 2, says="somebody/else")
    (root / "org/german/base_model").write_text("alpha\n")
    make_adapter(root / "own/adapter", own, 3)
    make_adapter(root / "pair/adapter", pair, 4, says="lost")
    return root


BASES = {"french": "alpha", "org/german": "alpha", "own-adapter": "own", "pair": "pair/base_model"}
PLACES = {"french": "french", "org/german": "org/german", "own-adapter": "own/adapter", "pair": "pair/adapter"}


def expected(root: Path, base: str, adapters: Mapping[str, Path]) -> dict[str, str]:
    """What `LLM(adapters=…)` answers, as `--lora` does."""
    llm = LLM(root / base, EngineConfig(threads=1), adapters=adapters)
    names = [None, *adapters]
    answers = llm.generate([PROMPT] * len(names), SamplingParams(max_tokens=6, temperature=0), adapter=names)
    return {name or base: answer.choices[0].text for name, answer in zip(names, answers, strict=True)}


def all_expected(root: Path) -> dict[str, str]:
    texts: dict[str, str] = {}
    for base in dict.fromkeys(BASES.values()):
        own = {name: root / PLACES[name] for name, other in BASES.items() if other == base}
        texts |= expected(root, base, own)
    return texts


def complete(client: httpx.Client, model: str) -> str:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return str(answer.json()["choices"][0]["text"])


def check(client: httpx.Client, texts: Mapping[str, str]) -> None:
    """All are listed, and answer with these texts, each base with its adapters from one engine."""
    cards = {card["id"]: card["parent"] for card in client.get("/v1/models").json()["data"]}
    assert cards == dict.fromkeys(BASES.values()) | BASES
    assert len(set(texts.values())) == len(texts)
    assert {name: complete(client, name) for name in texts} == texts
    stats = client.get("/admin/stats").json()
    told = {each["id"]: each for each in stats["models"]}
    assert stats["loads"] == 3
    assert all(told[base]["loads"] == 1 and told[base]["bytes"] > 0 for base in BASES.values())
    assert all(told[name]["state"] == "ready" and told[name]["bytes"] == 0 for name in BASES)


@pytest.mark.full
def test_adapters_of_a_directory_answer_as_those_that_were_named(tmp_path: Path) -> None:
    root = make_root(tmp_path / "models")
    make_adapter(root / "lost", root / "alpha", 5, says="org/unknown")
    (make_adapter(root / "broken", root / "alpha", 5, says="alpha") / "adapter_config.json").write_text("{")
    other = make_adapter(root / "dora", root / "alpha", 5)
    (other / "adapter_config.json").write_text(json.dumps(peft_config(base="alpha") | {"use_dora": True}))
    (make_adapter(root / "pickled", root / "alpha", 5, says="alpha") / "adapter_model.safetensors").unlink()
    texts = all_expected(root)
    args = ("--models", str(root), "--threads", "1", "--max-models", "3")
    with live_server(tmp_path, *args, faults="") as live, live.client() as client:
        check(client, texts)
        for name, why in {
            "lost": "it is an adapter of 'org/unknown', but there is no such model next to it",
            "broken": "adapter_config.json is not valid JSON",
            "dora": "adapter_config.json: use_dora is set",
            "pickled": "there is no adapter_model.safetensors",
        }.items():
            assert live.log_text.count(f"{name} under {root} is not served: {why}") == 1
            assert client.get(f"/v1/models/{name}").status_code == 404


@pytest.mark.full
def test_adapters_of_a_bucket_are_fetched_with_their_base(tmp_path: Path) -> None:
    root = make_root(tmp_path / "models")
    texts = all_expected(root)
    with running_store("gs") as store:
        for path in root.rglob("*"):
            if path.is_file():
                store.put(f"models/{path.relative_to(root).as_posix()}", path.read_bytes())
        env = {**store.environment(store.url), "GCS_BUCKET": BUCKET, "OSTRO_CACHE": str(tmp_path / "cache")}
        # The budget is there so that what they take is planned, too.
        args = ("--threads", "1", "--max-models", "3", "--memory-budget", "4G", "--kv-memory", "1M")
        with live_server(tmp_path, *args, faults="", env=env) as live, live.client() as client:
            check(client, texts)
            entries = {entry.reference.removeprefix(f"gs://{BUCKET}/models/"): entry for entry in cached(tmp_path)}
            # That of `own` came with it.
            assert entries.keys() == {"alpha", "french", "org/german", "own", "pair/base_model", "pair/adapter"}
            assert all(entry.in_use and not ModelStore().verify(entry) for entry in entries.values())
            client.post("/admin/unload/french")
            assert {entry.name for entry in cached(tmp_path) if not entry.in_use} == {"alpha", "french", "org/german"}
            # Here by now, the bucket is not needed.
            store.process.kill()
            store.process.wait()
            assert complete(client, "org/german") == texts["org/german"]


def cached(tmp_path: Path) -> list[Entry]:
    return ModelStore(tmp_path / "cache").entries()


def test_adapters_have_no_settings_of_their_own_but_their_pins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "models"
    alpha = write_model(root / "alpha")
    for name in ("french", "german"):
        make_adapter(root / name, alpha, 1, says="alpha")
    config = tmp_path / "ostro.yaml"
    config.write_text(f"models: {root}\nmodel_settings: {{german: {{threads: 1}}}}\npin: french")
    catalog = build_models(read_settings({}, config=config, directory=tmp_path).settings).pool.catalog
    asyncio.run(catalog.refresh())
    assert {spec.name: spec.pinned for spec in catalog.specs() if spec.base is None} == {"alpha": True}
    assert [spec.name for spec in catalog.specs()] == ["alpha", "french"]
    assert "german" in caplog.text
    assert "it is an adapter, and has the settings of its base" in caplog.text


@pytest.mark.full
def test_adapter_found_later_is_served_after_its_base_was_reloaded(tmp_path: Path) -> None:
    root = tmp_path / "models"
    alpha = write_model(root / "alpha")
    make_adapter(root / "french", alpha, 1, says="alpha")
    texts = expected(root, "alpha", {"french": root / "french"})

    config = tmp_path / "ostro.yaml"
    config.write_text(f"models: {root}\nthreads: 1")

    async def answer(models: Models, name: str) -> str:
        async with models.use(name) as model:
            params = SamplingParams(max_tokens=6, temperature=0)
            request = await model.service.prepare(PROMPT, params, adapter=model.adapter)
            return (await model.service.complete(request)).choices[0].text

    async def scenario() -> None:
        models = build_models(read_settings({}, config=config, directory=tmp_path).settings)
        await models.start()
        try:
            assert {name: await answer(models, name) for name in texts} == texts
            make_adapter(root / "late", alpha, 2, says="alpha")
            await models.pool.catalog.refresh()
            assert await answer(models, "french") == texts["french"]
            assert models.num_loads == 1
            later = expected(root, "alpha", {name: root / name for name in ("french", "late")})
            assert {name: await answer(models, name) for name in later} == later
            assert models.num_loads == 2
        finally:
            await models.stop()

    asyncio.run(asyncio.wait_for(scenario(), 120))
