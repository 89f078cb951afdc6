"""Offline batches: the predictor by itself, and under Ray Data where that is installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from model_directory import write_model

from ostro import LLM, EngineConfig, SamplingParams
from ostro.errors import BadRequest
from ostro.ray.data import OstroPredictor

PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
CONFIG = EngineConfig(kv_memory=8 << 20)
PROMPTS = ["the quick brown fox", "yes, no", "the lazy dog"]
PROGRAM = """
import json, sys, ray
from ostro import EngineConfig, SamplingParams
from ostro.ray.data import OstroPredictor

ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
rows = ray.data.from_items([{"prompt": prompt, "row": n} for n, prompt in enumerate(json.loads(sys.argv[2]))])
kwargs = {
    "model": sys.argv[1],
    "params": SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True),
    "config": EngineConfig(kv_memory=8 << 20),
}
done = rows.map_batches(OstroPredictor, fn_constructor_kwargs=kwargs, concurrency=1, num_cpus=1, batch_size=2)
print(json.dumps([row["text"] for row in sorted(done.take_all(), key=lambda row: row["row"])]))
ray.shutdown()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model")))


def expected(model: str) -> list[str]:
    return [completion.text for completion in LLM(model, CONFIG).generate(PROMPTS, PARAMS)]


@pytest.mark.full
def test_batch_gets_what_the_model_generates_beside_its_own_columns(model: str) -> None:
    predictor = OstroPredictor(model, params=PARAMS, config=CONFIG)
    batch = predictor({"prompt": PROMPTS, "row": [1, 2, 3]})
    assert batch["text"] == expected(model)
    assert batch["row"] == [1, 2, 3]
    assert batch["finish_reason"] == ["length"] * 3
    assert batch["completion_tokens"] == [6] * 3
    [chat] = predictor({"prompt": [[{"role": "user", "content": "yes, no"}]]})["text"]
    assert chat == LLM(model, CONFIG).chat([{"role": "user", "content": "yes, no"}], PARAMS).text


def test_batch_without_the_column_says_which_it_has(model: str) -> None:
    with pytest.raises(BadRequest, match="no column 'prompt' but question"):
        OstroPredictor(model, config=CONFIG)({"question": ["x"]})


@pytest.mark.slow
def test_ray_data_maps_a_dataset(model: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="Ray Data is not installed: make test-ray")
    pytest.importorskip("ray.data")
    env = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, model, json.dumps(PROMPTS)],
        env={**os.environ, **env},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert json.loads(ran.stdout.splitlines()[-1]) == expected(model)
