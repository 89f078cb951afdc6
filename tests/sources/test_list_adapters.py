"""Adapters that lie beside models: what they are called, and what they say of their bases."""

from pathlib import Path
from urllib.parse import unquote

import pytest
from fault_proxy import FaultProxy
from object_stores import BUCKET, ObjectStore

from ostro.sources.models import AdapterFiles, FoundModel, list_models

pytest_plugins = ["store_fixtures"]
pytestmark = pytest.mark.usefixtures("cache")

WHOLE = ("adapter_config.json", "adapter_model.safetensors")
TREE = {
    "tiny/config.json": "-",
    # Adapters by themselves.
    **{f"french/{name}": f"french {name}" for name in WHOLE},
    **{f"acme/german/{name}": f"german {name}" for name in WHOLE},
    "acme/german/base_model": " tiny\n",
    "weightless/adapter_config.json": "weightless",
    # An adapter and its base in one directory.
    **{f"pair/adapter/{name}": f"pair {name}" for name in WHOLE},
    "pair/base_model/config.json": "-",
    **{f"acme/pair/adapter/{name}": f"acme pair {name}" for name in WHOLE},
    "acme/pair/base_model/config.json": "-",
    **{f"told/adapter/{name}": f"told {name}" for name in WHOLE},
    "told/base_model": "acme/tiny",
    # A base with an adapter in it.
    "own/config.json": "-",
    **{f"own/adapter/{name}": f"own {name}" for name in WHOLE},
    "acme/own/config.json": "-",
    **{f"acme/own/adapter/{name}": f"acme own {name}" for name in WHOLE},
    # What belongs to another, or has no name.
    **{f"french/checkpoint-5/{name}": "-" for name in WHOLE},
    **{f"tiny/checkpoint-5/{name}": "-" for name in WHOLE},
    **{f"no name/{name}": "-" for name in WHOLE},
}
MODELS = {
    "acme/own": "acme/own",
    "acme/pair-base": "acme/pair/base_model",
    "own": "own",
    "pair/base_model": "pair/base_model",
    "tiny": "tiny",
}
ADAPTERS = {
    "acme/german": ("acme/german", "german", "tiny"),
    "acme/own-adapter": ("acme/own/adapter", "acme own", "acme/own"),
    "acme/pair": ("acme/pair/adapter", "acme pair", "acme/pair-base"),
    "french": ("french", "french", None),
    "own-adapter": ("own/adapter", "own", "own"),
    "pair": ("pair/adapter", "pair", "pair/base_model"),
    "told": ("told/adapter", "told", "acme/tiny"),
}


def expected(base: str) -> list[FoundModel]:
    adapters = {
        name: FoundModel(name, f"{base}/{path}", AdapterFiles(f"{text} adapter_config.json".encode(), on, True))
        for name, (path, text, on) in ADAPTERS.items()
    }
    adapters["weightless"] = FoundModel("weightless", f"{base}/weightless", AdapterFiles(b"weightless", None, False))
    return [*(FoundModel(name, f"{base}/{path}") for name, path in MODELS.items()), *adapters.values()]


def write(root: Path, tree: dict[str, str]) -> Path:
    for key, text in tree.items():
        path = root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_adapters_of_a_directory_are_found_with_their_bases(tmp_path: Path) -> None:
    assert list_models(str(write(tmp_path, TREE))) == expected(str(tmp_path))


@pytest.mark.full
def test_adapters_of_a_bucket_are_found_and_no_weights_are_read(
    store: ObjectStore, proxy: FaultProxy, prefix: str
) -> None:
    for key, text in TREE.items():
        store.put(f"{prefix}/{key}", text.encode())
    base = f"{store.scheme}://{BUCKET}/{prefix}"
    assert list_models(base) == expected(base)
    # On a busy machine the same may be asked for twice.
    assert len({target for target in proxy.targets if "prefix=" in target}) == 1
    # A config of each, and two files that name a base.
    assert len(set(proxy.reads)) == len(ADAPTERS) + 3
    assert not any("safetensors" in target for target in proxy.targets)
    # Only what is new is read again.
    proxy.forget_counts()
    store.put(f"{prefix}/french/adapter_config.json", b"new")
    [french] = [each.adapter for each in list_models(base) if each.name == "french"]
    assert french == AdapterFiles(b"new", None, True)
    assert {unquote(path).rpartition(f"{prefix}/")[2] for path in proxy.reads} == {"french/adapter_config.json"}


@pytest.mark.parametrize(
    ("tree", "found"),
    [
        (dict.fromkeys(WHOLE, "-"), {"place": None}),
        ({f"adapter/{name}": "-" for name in WHOLE} | {"base_model": "tiny"}, {"place": "tiny"}),
        ({f"adapter/{name}": "-" for name in WHOLE} | {"config.json": "-"}, {"place-adapter": "place"}),
        ({f"adapter/{name}": "-" for name in WHOLE} | {"base_model/config.json": "-"}, {"place": "base_model"}),
    ],
)
def test_a_place_may_itself_be_an_adapter(tree: dict[str, str], found: dict[str, str | None], tmp_path: Path) -> None:
    listed = list_models(str(write(tmp_path / "place", tree)))
    assert {each.name: each.adapter.base for each in listed if each.adapter is not None} == found


def test_huge_or_unreadable_file_is_barely_read(tmp_path: Path) -> None:
    write(tmp_path, {f"{name}/{file}": "-" for name in ("empty", "huge") for file in WHOLE})
    (tmp_path / "huge" / WHOLE[0]).write_bytes(b"x" * (3 << 20))
    (tmp_path / "empty" / WHOLE[0]).write_bytes(b"")
    configs = [each.adapter.config for each in list_models(str(tmp_path)) if each.adapter is not None]
    assert configs == [b"", b"x" * (1 << 18)]
