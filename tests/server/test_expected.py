"""Facts that the pool receives about a model before it is loaded."""

import asyncio
from pathlib import Path

import pytest
from model_directory import write_model

from ostro import devices as backends
from ostro.config import EngineConfig
from ostro.errors import ModelError
from ostro.pool.catalog import ModelSpec
from ostro.pool.pool import Files, Footprint
from ostro.server.models import build as build_models

GIB = 1 << 30


def expected(directory: Path, **config: object) -> Footprint | ModelError | None:
    spec = ModelSpec(name="far", config=EngineConfig(model="gs://bucket/far", **config))  # type: ignore[arg-type]
    return asyncio.run(build_models._expected(spec, Files(str(directory), None, lambda: None)))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny")


def test_a_fetched_model_is_planned_by_its_files(model: Path) -> None:
    """Only references that were paths were planned: what came from elsewhere counted as nothing."""
    small, large = (expected(model, device="cpu", kv_memory=size) for size in (GIB // 64, GIB // 8))
    assert isinstance(small, Footprint)
    assert isinstance(large, Footprint)
    assert large.bytes > small.bytes > GIB // 64


def test_on_a_gpu_it_is_planned_for_when_others_have_gone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a model that fills the GPU there was no room for a single page, so the next one seemed small."""
    monkeypatch.setattr(backends, "gpu_memory", lambda devices: (80 * GIB, GIB))
    monkeypatch.setattr(backends, "device_here", lambda name, backend="auto": "cuda")
    full = expected(model, gpu_memory_utilization=0.9)
    assert isinstance(full, Footprint)
    assert 60 * GIB < full.device_bytes <= 72 * GIB
    monkeypatch.setattr(backends, "gpu_memory", lambda devices: (GIB, GIB))
    refused = expected(model)
    assert isinstance(refused, ModelError)
    assert "no room for a KV cache on this GPU of 1.0 GiB" in str(refused)
