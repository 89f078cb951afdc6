"""Files of other projects that the server ships: which they are, where they came from, and that nobody changed them."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import ostro.server

SERVER = Path(ostro.server.__file__).parent
MANIFEST: list[dict[str, Any]] = json.loads((SERVER / "vendored.json").read_text(encoding="utf-8"))
FILES = {entry["path"]: entry["sha256"] for package in MANIFEST for entry in package["files"]}


@pytest.mark.parametrize("path", sorted(FILES))
def test_vendored_file_is_the_one_in_the_manifest(path: str) -> None:
    assert hashlib.sha256((SERVER / path).read_bytes()).hexdigest() == FILES[path]


def test_every_file_in_a_vendor_folder_is_in_the_manifest() -> None:
    present = {path.relative_to(SERVER).as_posix() for path in SERVER.rglob("vendor/**/*") if path.is_file()}
    assert present == {path for path in FILES if "/vendor/" in path}
    assert present


@pytest.mark.parametrize("package", MANIFEST, ids=lambda package: str(package["package"]))
def test_vendored_package_names_its_version_and_brings_its_licence(package: dict[str, Any]) -> None:
    assert package["version"].count(".") == 2
    licences = [entry["path"] for entry in package["files"] if "LICENSE" in entry["path"]]
    assert licences, "the licence lies beside the files"
    assert package["licence"] in ("MIT", "BSD-3-Clause", "Apache-2.0", "OFL-1.1")
    # The licences ask for this notice in every copy.
    assert all("Copyright" in (SERVER / path).read_text(encoding="utf-8") for path in licences)
