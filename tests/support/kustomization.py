"""Renders a kustomization as `kustomize build` does, as far as ours go: resources, components, namespace, labels,
images and patches by strategic merge. Anything else in one is an error. Where kustomize is installed, a test holds the
two equal.
"""

import copy
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]

_KNOWN = {"apiVersion", "kind", "resources", "components", "namespace", "labels", "images", "patches"}
_CLUSTER_WIDE = {"Namespace"}
# Lists that merge by a key; others are replaced.
_MERGE_KEYS = {"containers": "name", "volumes": "name", "env": "name", "volumeMounts": "mountPath"}


def render(directory: Path) -> list[Manifest]:
    return _applied([], directory)


def _applied(manifests: list[Manifest], directory: Path) -> list[Manifest]:
    """The manifests with what a kustomization adds to them and does to them."""
    plan = yaml.safe_load((directory / "kustomization.yaml").read_text(encoding="utf-8"))
    assert set(plan) <= _KNOWN, f"{directory}: {set(plan) - _KNOWN} is not rendered here"
    manifests = list(manifests)
    for name in plan.get("resources", []):
        path = directory / name
        manifests += render(path) if path.is_dir() else _documents(path)
    for name in plan.get("components", []):
        manifests = _applied(manifests, directory / name)
    for patch in plan.get("patches", []):
        for change in _documents(directory / patch["path"]):
            manifests = [_merged(each, change) if _same(each, change) else each for each in manifests]
    for manifest in manifests:
        _transform(manifest, plan)
    return manifests


def _documents(path: Path) -> list[Manifest]:
    return [each for each in yaml.safe_load_all(path.read_text(encoding="utf-8")) if each]


def _same(manifest: Manifest, change: Manifest) -> bool:
    return (manifest["kind"], manifest["metadata"]["name"]) == (change["kind"], change["metadata"]["name"])


def _merged(old: Any, new: Any, key: str = "") -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        merged = copy.deepcopy(old)
        for name, value in new.items():
            if value is None:
                merged.pop(name, None)
            else:
                merged[name] = _merged(old.get(name), value, name)
        return merged
    if isinstance(old, list) and isinstance(new, list) and (by := _MERGE_KEYS.get(key)):
        changes = {each[by]: each for each in new}
        kept = [_merged(each, changes.pop(each[by])) if each[by] in changes else each for each in old]
        return [*changes.values(), *kept]
    return _without_nulls(new)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _transform(manifest: Manifest, plan: Manifest) -> None:
    metadata = manifest["metadata"]
    if (namespace := plan.get("namespace")) and manifest["kind"] not in _CLUSTER_WIDE:
        metadata["namespace"] = namespace
    for labels in plan.get("labels", []):
        assert set(labels) == {"pairs"}, "labels of selectors are not rendered here"
        metadata["labels"] = metadata.get("labels", {}) | labels["pairs"]
    for image in plan.get("images", []):
        for container in _containers(manifest):
            if container["image"].partition(":")[0] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"


def _containers(manifest: Manifest) -> list[Manifest]:
    if manifest["kind"] != "Deployment":
        return []
    found = manifest["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, list)
    return found
