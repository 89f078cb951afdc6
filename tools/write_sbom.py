"""Writes a software bill of materials in CycloneDX's JSON: what a wheel of Ostro brings with it.

build/release/bin/python tools/write_sbom.py ENVIRONMENT/bin/python ostro.cdx.json

It lists the packages of an environment in which the wheel alone was installed, and the files that the package itself
contains from other projects (src/ostro/server/vendored.json). Run it with a Python that has cyclonedx-bom; the
environment needs nothing for it, pip included.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

ROOT = Path(__file__).resolve().parents[1]
VENDORED = ROOT / "src" / "ostro" / "server" / "vendored.json"


def listed(python: Path) -> dict[str, Any]:
    """The bill of the environment that this Python belongs to, as cyclonedx-bom has it."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "listed.json"
        command: list[str | Path] = [sys.executable, "-m", "cyclonedx_py", "environment"]
        command += ["--pyproject", ROOT / "pyproject.toml", "--mc-type", "application", "--output-reproducible"]
        command += ["--output-format", "JSON", "--spec-version", "1.6", "--output-file", output, python]
        subprocess.run(command, check=True)
        bill: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return bill


def with_contained(bill: Mapping[str, Any], vendored: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The bill, and the entries of vendored.json as components that the package itself depends on."""
    contained = [_contained(each) for each in vendored]
    names = [each["bom-ref"] for each in contained]
    own = bill["metadata"]["component"]["bom-ref"]
    dependencies = [
        each | {"dependsOn": sorted([*each.get("dependsOn", []), *names])} if each["ref"] == own else each
        for each in bill["dependencies"]
    ]
    return {
        **bill,
        "components": sorted([*bill["components"], *contained], key=lambda each: str(each["bom-ref"])),
        "dependencies": [*dependencies, *({"ref": name} for name in names)],
    }


def _contained(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of vendored.json as a component, with the digests of its files."""
    name = entry["package"].removeprefix("npm:")
    # A scope's @ is written %40; the slash after it stays.
    url = f"pkg:npm/{quote(name)}@{entry['version']}"
    files = [
        {
            "type": "file",
            "name": f"ostro/server/{file['path']}",
            "hashes": [{"alg": "SHA-256", "content": file["sha256"]}],
        }
        for file in entry["files"]
    ]
    return {
        "type": "library",
        "bom-ref": url,
        "name": name,
        "version": entry["version"],
        "purl": url,
        "licenses": [{"license": {"id": entry["licence"]}}],
        "components": files,
    }


def main(python: Path, output: Path) -> int:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    vendored = json.loads(VENDORED.read_text(encoding="utf-8"))
    text = json.dumps(with_contained(listed(python), vendored), indent=2) + "\n"
    if (error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)) is not None:
        print(f"The bill of materials does not fit CycloneDX's schema: {error}", file=sys.stderr)
        return 1
    output.write_text(text, encoding="utf-8")
    print(f"{output}: {len(json.loads(text)['components'])} components")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("Usage: python tools/write_sbom.py ENVIRONMENT/bin/python OUTPUT")
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
