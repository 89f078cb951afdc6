"""Parts of GGUF files of models that keep a state, which hold rows and heads in an order of their own."""

from pathlib import Path

import gguf
import pytest
import torch
from dense_context import dense_logits
from divided_models import ThreadCollective, ThreadGroup
from gguf_cases import CASES, build, save

from ostro.backends.backend import open_model
from ostro.backends.torch.planning import host_parts
from ostro.config import EngineConfig
from ostro.devices import Memory
from ostro.models.architecture import Architecture
from ostro.models.cut import cut
from ostro.torch_models.build import build_described
from ostro.torch_models.loading import load_weights, places_of
from ostro.torch_models.shard import Shard
from ostro.weights import open_checkpoint

GIB = 1 << 30
DENSE = [name for name, case in CASES.items() if case.family.recurrent and not case.metadata.get("expert_count")]


@pytest.mark.parametrize("name", DENSE)
def test_parts_give_the_logits_of_the_whole_file_and_take_what_is_planned(tmp_path: Path, name: str) -> None:
    case, group = CASES[name], ThreadGroup(2)
    path = save(tmp_path / "tiny.gguf", case, build(case.config), gguf.GGMLQuantizationType.Q8_0)
    asked = EngineConfig(device="cpu", backend="torch", tensor_parallel=2)
    opened = open_model(open_checkpoint(path), asked)
    described = opened.description
    assert isinstance(described, Architecture)
    own = cut(described, 2)
    shards = [Shard(rank, own, ThreadCollective(group, rank)) for rank in range(2)]
    whole, *parts = (build_described(described, dtype=torch.float32, shard=shard) for shard in (None, *shards))
    for model in (whole, *parts):
        load_weights(model, opened.checkpoint.tensors())
    ids = [at * 7 % 96 for at in range(40)]
    expected = dense_logits(whole, ids, chunk=9)
    for logits in group.run(lambda rank: dense_logits(parts[rank], ids, chunk=9)):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    places = [place for model in parts for place in places_of(model).values() if place.repeated]
    kept = sum(each.nbytes for model in parts for each in model.parameters())
    planned = host_parts(opened, described, Memory(GIB, GIB)).weights
    assert kept - sum(place.memory[1:].nbytes for place in places) == planned
