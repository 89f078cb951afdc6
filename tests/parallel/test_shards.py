"""A model's parts, run by threads, give the whole model's logits; what does not divide is refused by name."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from math import prod

import pytest
import torch
from dense_context import dense_logits
from divided_models import FAMILIES, ThreadCollective, ThreadGroup, divided
from every_family import CASES, DENSE, DENSE_RECURRENT, DIVISIBLE_STATES, TINY
from native_models import ModelCheckpoint, savable_model

from ostro.errors import BadCheckpoint, BadRequest, UnsupportedModel
from ostro.models.architecture import Architecture, GatedDelta
from ostro.models.cut import cut, divisible, most_ranks, rank_shapes, recurrent_shares
from ostro.models.registry import describe
from ostro.torch_models.build import build_described, build_model
from ostro.torch_models.loading import load_weights, places_of
from ostro.torch_models.shard import Shard

IDS = [3, 299, 17, 128, 255, 256, 8, 41, 127, 0]


def described(config: Mapping[str, object]) -> Architecture:
    found = describe(config)
    assert isinstance(found, Architecture)
    return found


def test_all_families_are_divided_but_mixtures_and_those_of_torch_alone() -> None:
    assert {name for name in CASES if is_divided(name)} == {*DENSE, *DENSE_RECURRENT}


def is_divided(name: str) -> bool:
    try:
        divisible(describe(TINY[name]))
    except UnsupportedModel:
        return False
    return True


@pytest.mark.cases(10)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_give_the_whole_models_logits(family: str, ranks: int) -> None:
    whole, group = savable_model(FAMILIES[family]), ThreadGroup(ranks)
    parts = divided(FAMILIES[family], whole, group)
    found = group.run(lambda rank: dense_logits(parts[rank], IDS, chunk=4))
    expected = dense_logits(whole, IDS, chunk=4)
    for logits in found:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(logits, found[0])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", DIVISIBLE_STATES)
def test_parts_of_recurrent_models_give_the_whole_models_logits(name: str, ranks: int) -> None:
    whole, group = savable_model(DIVISIBLE_STATES[name]), ThreadGroup(ranks)
    parts = divided(DIVISIBLE_STATES[name], whole, group)
    found = group.run(lambda rank: dense_logits(parts[rank], IDS, chunk=4))
    expected = dense_logits(whole, IDS, chunk=4)
    for logits in found:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(logits, found[0])


@pytest.mark.parametrize("ranks", [2, 4])
def test_value_heads_may_be_tiled(ranks: int) -> None:
    """As in GGUF files: a rank's heads do not follow each other."""
    config = DIVISIBLE_STATES["qwen3_5"]
    layers = tuple(
        replace(layer, mixer=replace(layer.mixer, head_map="tiled")) if isinstance(layer.mixer, GatedDelta) else layer
        for layer in described(config).layers
    )
    tiled, group = replace(described(config), layers=layers), ThreadGroup(ranks)
    stored = list(ModelCheckpoint(savable_model(config), config).tensors())
    shards = [Shard(rank, cut(tiled, ranks), ThreadCollective(group, rank)) for rank in range(ranks)]
    whole, *parts = (build_described(tiled, dtype=torch.float32, shard=shard) for shard in (None, *shards))
    for model in (whole, *parts):
        load_weights(model, stored)
    expected = dense_logits(whole, IDS, chunk=4)
    assert not torch.allclose(expected, dense_logits(savable_model(config), IDS, chunk=4), rtol=1e-2)
    for logits in group.run(lambda rank: dense_logits(parts[rank], IDS, chunk=4)):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_rank_holds_its_part_of_the_weights_only(ranks: int) -> None:
    config = {**FAMILIES["llama"], "vocab_size": 128 * 8 * 4}
    whole, group = savable_model(config), ThreadGroup(ranks)
    size = sum(parameter.numel() for parameter in whole.parameters())
    copied_heads = 2 * (ranks // 2 - 1) * 2 * 4 * 32 * 2
    vectors = 5 * 32
    for part in divided(config, whole, group):
        own = sum(parameter.numel() for parameter in part.parameters())
        assert own == (size - vectors + copied_heads) / ranks + vectors


@pytest.mark.parametrize("tied", [True, False])
def test_padding_of_the_vocabulary_is_zeros(tied: bool) -> None:
    """It was whatever was in memory, NaN included."""
    config = {**FAMILIES["llama"], "vocab_size": 130, "tie_word_embeddings": tied}
    whole = savable_model(config)
    # Fills uninitialized memory with NaN.
    torch.use_deterministic_algorithms(True)
    try:
        parts = divided(config, whole, ThreadGroup(4))
    finally:
        torch.use_deterministic_algorithms(False)
    for part in parts:
        assert all(parameter.isfinite().all() for parameter in part.parameters())
    assert [int(part.get_parameter("model.embed_tokens.weight").any(1).sum()) for part in parts] == [128, 2, 0, 0]


@pytest.mark.cases(10)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_rank_keeps_is_known_without_torch(family: str, ranks: int) -> None:
    config = FAMILIES[family]
    shapes = rank_shapes(described(config), cut(described(config), ranks))
    [part, *_] = divided(config, savable_model(config), ThreadGroup(ranks))
    repeated = sum(place.memory[1:].numel() for place in places_of(part).values() if place.repeated)
    assert shapes.keys() == places_of(part).keys()
    assert sum(map(prod, shapes.values())) == sum(each.numel() for each in part.parameters()) - repeated


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", DIVISIBLE_STATES)
def test_what_a_rank_keeps_of_recurrent_models_is_known_without_torch(name: str, ranks: int) -> None:
    config = DIVISIBLE_STATES[name]
    model, own = described(config), cut(described(config), ranks)
    [part, *_] = divided(config, savable_model(config), ThreadGroup(ranks))
    repeated = sum(place.memory[1:].numel() for place in places_of(part).values() if place.repeated)
    assert rank_shapes(model, own).keys() == places_of(part).keys()
    kept = sum(map(prod, rank_shapes(model, own).values()))
    assert kept == sum(each.numel() for each in part.parameters()) - repeated
    assert tuple(part.states) == own.states(model)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", DIVISIBLE_STATES)
def test_ranks_hold_all_of_a_recurrent_mixer(name: str, ranks: int) -> None:
    """Every head or channel is one rank's, and its state as well."""
    model = described(DIVISIBLE_STATES[name])
    own = cut(model, ranks)
    mixers = [layer.recurrent for layer in model.layers if layer.recurrent is not None]
    tiled = [replace(each, head_map="tiled") for each in mixers if isinstance(each, GatedDelta)]
    for mixer in (*mixers, *tiled):
        shares = [recurrent_shares(mixer, own, rank) for rank in range(ranks)]
        heads = list(chain.from_iterable(chain.from_iterable(each.heads for each in shares)))
        assert sorted(heads) == list(range(mixer.state.matrices[0] if mixer.state.matrices else 0))
        channels = set(chain.from_iterable(chain.from_iterable(each.channels for each in shares)))
        assert channels == set(range(mixer.conv.channels))
        for number, projection in enumerate(mixer.projections):
            rows = [list(chain.from_iterable(each.projections[number].rows)) for each in shares]
            columns = [list(chain.from_iterable(each.projections[number].columns)) for each in shares]
            assert {len(each) for each in rows} == {len(rows[0])}
            assert {len(each) for each in columns} == {len(columns[0])}
            assert set(chain.from_iterable(rows)) == set(range(projection.rows))
            assert set(chain.from_iterable(columns)) == set(range(projection.columns))
        part = own.mixer(mixer)
        assert part.conv.channels == sum(map(len, shares[0].channels))
        assert (part.state.matrices is None) == (mixer.state.matrices is None)


def test_a_tensor_of_the_wrong_shape_is_named_with_the_whole_shape() -> None:
    config = FAMILIES["llama"]
    whole = savable_model({**config, "intermediate_size": 64})
    shard = Shard(0, cut(described(config), 2), ThreadCollective(ThreadGroup(2), 0))
    part = build_model(config, dtype=torch.float32, shard=shard)
    with pytest.raises(BadCheckpoint, match=r"gate_proj.*64.*48"):
        load_weights(part, ModelCheckpoint(whole, config).tensors())


@pytest.mark.parametrize(
    ("changes", "ranks", "problem", "fitting"),
    [
        ({}, 3, "8 attention heads", "1, 2, 4, 8"),
        ({}, 16, "8 attention heads", "1, 2, 4, 8"),
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, 2, "9 attention heads", "1, 3"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, 4, "6 KV heads", "1, 2, 3, 6, 12"),
        ({"intermediate_size": 52}, 8, "MLP's width, 52", "1, 2, 4"),
    ],
)
def test_indivisible_degree_is_refused_with_the_degrees_that_divide(
    changes: Mapping[str, object], ranks: int, problem: str, fitting: str
) -> None:
    with pytest.raises(BadRequest, match=rf"{problem}.*Set it to one of {fitting}\."):
        cut(described({**FAMILIES["llama"], **changes}), ranks)


@pytest.mark.parametrize(
    ("name", "changes", "ranks", "problem", "fitting"),
    [
        ("qwen3_5", {}, 8, "4 key heads of the model's delta nets", "1, 2, 4"),
        ("nemotron_h", {"mamba_num_heads": 6}, 4, "6 heads of the model's Mamba-2 layers", "1, 2"),
        ("nemotron_h", {"mamba_num_heads": 12, "n_groups": 3}, 4, "the 3 groups of Mamba-2 layers", "1"),
    ],
)
def test_indivisible_mixers_are_refused_with_the_degrees_that_divide(
    name: str, changes: Mapping[str, object], ranks: int, problem: str, fitting: str
) -> None:
    with pytest.raises(BadRequest, match=rf"{problem}.*Set it to one of {fitting}\."):
        cut(described({**DIVISIBLE_STATES[name], **changes}), ranks)


@pytest.mark.parametrize(
    ("changes", "devices", "ranks"),
    [
        ({}, 1, 1),
        ({}, 8, 8),
        ({}, 7, 4),
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, 8, 3),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, 8, 6),
        ({"intermediate_size": 52}, 8, 4),
    ],
)
def test_the_most_ranks_are_those_that_the_model_can_be_cut_for(
    changes: Mapping[str, object], devices: int, ranks: int
) -> None:
    model = described({**FAMILIES["llama"], **changes})
    assert most_ranks(model, devices) == ranks
    assert cut(model, ranks).ranks == ranks


UNDIVIDED = pytest.mark.parametrize(
    ("config", "name"),
    [
        (TINY["hrm_text"], "its layers run several times per token"),
        (TINY["olmoe"], "mixture of experts"),
        (TINY["gemma4"], "its layers differ in their heads"),
    ],
    ids=["hrm_text", "olmoe", "gemma4"],
)


@UNDIVIDED
def test_indivisible_model_stays_on_one_device(config: Mapping[str, object], name: str) -> None:
    assert most_ranks(describe(config), 8) == 1


@UNDIVIDED
def test_indivisible_models_are_refused_by_name(config: Mapping[str, object], name: str) -> None:
    shard = Shard(0, cut(described(FAMILIES["llama"]), 2), ThreadCollective(ThreadGroup(2), 0))
    with pytest.raises(UnsupportedModel, match=name):
        build_model(config, dtype=torch.float32, shard=shard)
    with pytest.raises(UnsupportedModel, match=name):
        cut(describe(config), 2)
