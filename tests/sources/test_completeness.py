"""A model that is still being uploaded is not taken for one."""

import json
from collections.abc import Collection
from pathlib import Path

import pytest
from bucket_models import CONFIG, contents, models_in
from fault_proxy import FaultProxy
from object_stores import ObjectStore

from ostro.errors import ModelNotFound
from ostro.sources.fetch import fetch_model
from ostro.sources.files import gguf_files, missing, model_files

pytest_plugins = ["store_fixtures"]
pytestmark = pytest.mark.usefixtures("cache")

INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
INDEXED = json.dumps({"weight_map": {f"tensor{shard}": shard for shard in SHARDS}}).encode()
NO_WEIGHTS = "weights (model.safetensors, a GGUF file or pytorch_model.bin)"
PICKLE_INDEX = "pytorch_model.bin.index.json"
PICKLES = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
INDEXED_PICKLES = json.dumps({"weight_map": {f"tensor{file}": file for file in PICKLES}}).encode()


@pytest.mark.parametrize(
    ("names", "lacks"),
    [
        (["config.json"], [NO_WEIGHTS]),
        (["config.json", "tokenizer.json", "adapter/adapter_model.safetensors"], [NO_WEIGHTS]),
        (["adapter_config.json"], [NO_WEIGHTS]),
        (["adapter_config.json", "adapter_model.safetensors"], []),
        (["config.json", "model.safetensors"], []),
        (["config.json", "1_Pooling/config.json", "2_Dense/model.safetensors"], []),
        (["config.json", INDEX, *SHARDS], []),
        (["config.json", INDEX, *SHARDS[1:]], SHARDS[:1]),
        (["config.json", *SHARDS], [INDEX]),
        (["config.json", "model.safetensors", SHARDS[0]], []),
        (["config.json", "pytorch_model.bin"], []),
        (["config.json", PICKLE_INDEX, *PICKLES], []),
        (["config.json", PICKLE_INDEX, PICKLES[0]], PICKLES[1:]),
        (["config.json", *PICKLES], [PICKLE_INDEX]),
        (["a.gguf"], []),
        (["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"], []),
        (["a-00002-of-00002.gguf", "b.gguf"], ["a-00001-of-00002.gguf"]),
        (["step-1/manifest.ocdbt", "step-1/metadata.json"], []),
        (["model/transformer/w/.zarray", "metadata.json"], []),
    ],
)
def test_missing_packages_are_reported_with_names_and_index(names: Collection[str], lacks: list[str]) -> None:
    indexes = {INDEX: INDEXED, PICKLE_INDEX: INDEXED_PICKLES}
    assert missing(names, {name: content for name, content in indexes.items() if name in names}) == lacks


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b'{"weight_map": 1}', b'{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_left_to_whoever_opens_the_model(content: bytes) -> None:
    assert missing([INDEX, "model.safetensors"], {INDEX: content}) == []


def test_files_are_chosen_by_name() -> None:
    assert model_files(["config.json", "model.safetensors", "q4.gguf", "consolidated.safetensors", "a.bin"]) == [
        "config.json",
        "model.safetensors",
    ]
    both = ["config.json", INDEX, *SHARDS, PICKLE_INDEX, *PICKLES, "training_args.bin", "optimizer.bin"]
    assert model_files(both) == ["config.json", INDEX, *SHARDS]
    assert model_files(both[:1] + both[5:]) == ["config.json", PICKLE_INDEX, *PICKLES]
    templates = ["config.json", "additional_chat_templates/tool_use.jinja", "model.safetensors"]
    assert model_files([*templates, "additional_chat_templates/rag.jinja", "code/a.jinja"]) == templates
    assert model_files(["config.json", "q4.gguf", "pytorch_model.bin"]) == ["config.json", "q4.gguf"]
    assert gguf_files(["a.gguf", "a.gguf.bak", "b.gguf"], "a.gguf") == ["a.gguf"]
    split = ["s-00001-of-00002.gguf", "s-00002-of-00002.gguf"]
    assert gguf_files([*split, "s-00001-of-00003.gguf", "s.gguf"], split[1]) == split


@pytest.mark.parametrize("store", ["gcs_store"], indirect=True)
@pytest.mark.parametrize(
    ("first", "later"),
    [
        ({"config.json": CONFIG, INDEX: INDEXED, SHARDS[0]: b"1"}, dict.fromkeys(SHARDS[1:], b"2")),
        ({"config.json": CONFIG, "tokenizer.json": b"{}"}, {"model.safetensors": b"-"}),
        ({"a-00001-of-00002.gguf": b"1"}, {"a-00002-of-00002.gguf": b"2"}),
        ({"config.json": CONFIG, PICKLE_INDEX: INDEXED_PICKLES, PICKLES[0]: b"1"}, {PICKLES[1]: b"2"}),
    ],
    ids=["shards", "weights", "gguf", "pickles"],
)
def test_a_half_uploaded_model_is_refused_and_fetched_once_it_is_whole(
    store: ObjectStore, proxy: FaultProxy, prefix: str, cache: Path, first: dict[str, bytes], later: dict[str, bytes]
) -> None:
    """What was there was cached, and called the model from then on."""
    reference = store.put_model(prefix, first)
    with pytest.raises(ModelNotFound, match="is not complete in the store yet: it lacks"):
        fetch_model(reference, progress=False)
    assert models_in(cache) == []
    assert not [path for path in proxy.reads if path.endswith((".safetensors", ".gguf"))]
    store.put_model(prefix, later)
    assert contents(fetch_model(reference, progress=False)) == first | later


@pytest.mark.parametrize("store", ["gcs_store"], indirect=True)
def test_one_file_of_a_split_model_that_is_not_whole_is_refused(
    store: ObjectStore, proxy: FaultProxy, prefix: str
) -> None:
    reference = store.put_model(prefix, {"a-00001-of-00002.gguf": b"1", "b.gguf": b"B"})
    with pytest.raises(ModelNotFound, match=r"it lacks a-00002-of-00002\.gguf"):
        fetch_model(f"{reference}/a-00001-of-00002.gguf", progress=False)
