"""What a release is made of: its files are checked before they are published, an index gives them out, and the bill of
materials names what they contain. `make rehearse-release` does it with the real ones.
"""

import hashlib
import io
import json
import tarfile
import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT

from check_distributions import NAME, PLATFORMS, PROJECT, SOURCES, VERSION, complaints, main, tracked_files
from local_index import local_index
from write_sbom import VENDORED, with_contained

TRACKED = tracked_files()
INFO = f"{NAME}-{VERSION}.dist-info"
METADATA = f"Metadata-Version: 2.4\nName: {NAME}\nVersion: {VERSION}\nRequires-Python: {PROJECT['requires-python']}\n\n"
CORE = "ostro/kernels/cpu/libostro_native.so"
WHEEL = dict.fromkeys([*TRACKED, CORE], "") | {
    f"{INFO}/METADATA": METADATA,
    f"{INFO}/entry_points.txt": "[console_scripts]\nostro = ostro.cli:main\n",
    f"{INFO}/licenses/LICENSE": "",
    f"{INFO}/RECORD": "",
}
SOURCE = dict.fromkeys([*SOURCES, *(f"src/{each}" for each in TRACKED)], "") | {"PKG-INFO": METADATA}
LINUX = "manylinux_2_28_x86_64"


def write_wheel(directory: Path, files: dict[str, str] = WHEEL, platform: str = LINUX, python: str = "py3") -> Path:
    path = directory / f"{NAME}-{VERSION}-{python}-none-{platform}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def write_source(directory: Path, files: dict[str, str] = SOURCE) -> Path:
    path = directory / f"{NAME}-{VERSION}.tar.gz"
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"{NAME}-{VERSION}/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source"))


def test_good_files_pass(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / source.name).write_bytes(source.read_bytes())
    wheel = write_wheel(tmp_path)
    assert main([str(tmp_path)]) == 0
    assert wheel.name in capsys.readouterr().out


def test_a_release_has_a_wheel_for_every_platform(tmp_path: Path, source: Path) -> None:
    wheel = write_wheel(tmp_path)
    missing = [f"There is no wheel for {each}." for each in PLATFORMS if each != "Linux on x86-64"]
    assert list(complaints([wheel, source], complete=True)) == missing
    others = [
        write_wheel(tmp_path, platform=each)
        for each in ("manylinux_2_28_aarch64", "macosx_11_0_arm64", "macosx_11_0_x86_64")
    ]
    assert list(complaints([wheel, *others, source], complete=True)) == []


WITHOUT_CORE = {name: text for name, text in WHEEL.items() if name != CORE}
WITHOUT_A_FILE = {name: text for name, text in WHEEL.items() if name != "ostro/server/vendored.json"}


@pytest.mark.parametrize(
    ("files", "platform", "python", "complaint"),
    [
        (WITHOUT_CORE, LINUX, "py3", "it has no native core"),
        (WITHOUT_A_FILE, LINUX, "py3", "it lacks ostro/server/vendored.json"),
        (WHEEL | {"ostro/notes.txt": ""}, LINUX, "py3", "it holds ostro/notes.txt, which is none of the package's"),
        (WHEEL | {"tests/test_a.py": ""}, LINUX, "py3", "it holds tests/test_a.py"),
        (WHEEL | {f"{INFO}/METADATA": METADATA.replace(VERSION, "9")}, LINUX, "py3", "its metadata is of ostro 9"),
        (WHEEL | {f"{INFO}/entry_points.txt": ""}, LINUX, "py3", "it does not install the command"),
        (WHEEL, LINUX, "cp312", "one wheel should serve every Python 3"),
        (WHEEL, "linux_x86_64", "py3", "linux_x86_64 is no platform that an index takes"),
    ],
)
def test_a_wheel_that_should_not_be_published_is_noticed(
    files: dict[str, str], platform: str, python: str, complaint: str, tmp_path: Path, source: Path
) -> None:
    wheel = write_wheel(tmp_path, files, platform, python)
    assert any(complaint in each for each in complaints([wheel, source], complete=True))


def test_a_source_distribution_that_cannot_be_built_or_says_too_much_is_noticed(tmp_path: Path) -> None:
    files = {name: text for name, text in SOURCE.items() if name != "native/CMakeLists.txt"} | {
        ".env": "OSTRO_API_KEY=x"
    }
    path = write_source(tmp_path, files)
    found = list(complaints([write_wheel(tmp_path), path]))
    assert found == [f"{path.name}: it lacks native/CMakeLists.txt", f"{path.name}: it holds .env, which nobody needs"]


def test_what_is_no_distribution_is_noticed(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").touch()
    assert main([str(tmp_path)]) == 1
    said = capsys.readouterr().err
    for each in ("notes.txt is neither", "There are 0 source distributions", "There is no wheel"):
        assert each in said
    assert main([str(tmp_path / "none")]) == 1
    monkeypatch.setattr("check_distributions.MOST_BYTES", 1000)
    assert any("more than the 0 that PyPI takes" in each for each in complaints([write_wheel(tmp_path), source]))


# --- the index ------------------------------------------------------------------------------------------------------


def test_an_index_of_one_directory_gives_out_its_files_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "ostro-1.0-py3-none-any.whl").write_bytes(b"wheel")
    (tmp_path / "ostro-1.0.tar.gz").write_bytes(b"source")
    (tmp_path / "notes.txt").write_bytes(b"private")
    with local_index(tmp_path) as index:
        with urllib.request.urlopen(f"{index.url}ostro/", timeout=60) as answer:
            page = answer.read().decode()
        assert f"#sha256={hashlib.sha256(b'wheel').hexdigest()}" in page
        assert "notes.txt" not in page
        root = index.url.removesuffix("simple/")
        with urllib.request.urlopen(f"{root}files/ostro-1.0-py3-none-any.whl", timeout=60) as answer:
            assert answer.read() == b"wheel"
        asked = urllib.request.Request(f"{root}files/ostro-1.0.tar.gz", method="HEAD")
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert (answer.headers["Content-Length"], answer.read()) == ("6", b"")
        for path in ("files/notes.txt", "files/../notes.txt", "simple/numpy/", "simple/ostro/x/"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(root + path, timeout=60)
            with refused.value:
                assert refused.value.code == 404
        assert index.fetched == ["ostro-1.0-py3-none-any.whl"]


# --- the bill of materials ------------------------------------------------------------------------------------------


def test_the_bill_of_materials_names_the_files_that_come_from_other_projects() -> None:
    bill: dict[str, Any] = {
        "metadata": {"component": {"bom-ref": "root", "name": "ostro"}},
        "components": [{"bom-ref": "numpy==2", "name": "numpy"}],
        "dependencies": [{"ref": "root", "dependsOn": ["numpy==2"]}, {"ref": "numpy==2"}],
    }
    vendored = json.loads(VENDORED.read_text(encoding="utf-8"))
    whole = with_contained(bill, vendored)
    named = {each["bom-ref"]: each for each in whole["components"]}
    assert "numpy==2" in named
    assert any(each.startswith("pkg:npm/%40highlightjs/cdn-assets@") for each in named)
    assert len(named) == 1 + len(vendored)
    [root] = [each for each in whole["dependencies"] if each["ref"] == "root"]
    assert set(root["dependsOn"]) == named.keys()
    assert {each["ref"] for each in whole["dependencies"]} == {"root", *named}
    for each in named.values():
        for file in each.get("components", []):
            content = (ROOT / "src" / file["name"]).read_bytes()
            assert file["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(content).hexdigest()}]
