"""Imports point down only, package by package. `PACKAGES` is the map: one row for each, lowest first. `LIBRARIES` says
who may import the ones that are heavy, or that belong in one place.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Literal

import pytest

SOURCE = Path(__file__).parents[1] / "src"

# Each package or top-level module of ostro, and the rows above it in this table that it may import.
_ROWS = {
    "version": "",
    "errors": "",
    "processes": "",
    "routing": "",
    "system": "errors",
    "config": "errors",
    "devices": "config errors system",
    "structured": "errors",
    "sampling_params": "errors structured",
    "sampling_defaults": "errors sampling_params",
    "formats": "errors",
    "sources": "errors formats processes system",
    "models": "errors",
    "weights": "errors formats models sources system",
    "text": "config errors formats processes sampling_params sources weights",
    "answers": "errors formats structured text",
    "kernels": "errors models system",
    "torch_models": "errors kernels models",
    "engine": "errors sampling_params",
    "grammar": "engine errors formats processes structured",
    "backends": (
        "config devices engine errors formats kernels models processes sampling_params sources system torch_models "
        "version weights"
    ),
    "engine_process": "backends config devices engine errors grammar processes sampling_params sources text weights",
    "frontend": "answers config engine errors grammar sampling_defaults sampling_params text weights",
    "llm": (
        "answers backends config engine errors frontend grammar sampling_defaults sampling_params sources text weights"
    ),
    "evaluation": "errors frontend llm sampling_params system",
    "pool": "config engine_process errors",
    "schemas": "errors sampling_defaults sampling_params structured",
    "server": (
        "answers backends config devices engine engine_process errors frontend pool processes sampling_defaults "
        "sampling_params schemas sources system text version weights"
    ),
    "client": "errors sampling_params schemas",
    "measure": "client config engine errors frontend llm sampling_params version weights",
    "simulation": "engine errors measure routing sampling_params",
    "ray": "config devices engine_process errors llm pool routing sampling_params server system",
    "app": "errors server system",
    "recipes": "backends config errors formats sampling_defaults weights",
    "cli": (
        "backends client config devices engine errors frontend kernels llm measure recipes sampling_params schemas "
        "server simulation sources system version"
    ),
    "__main__": "cli",
    "": "client config errors frontend llm sampling_params structured version",
}
PACKAGES: Mapping[str, tuple[str, ...]] = {row: tuple(above.split()) for row, above in _ROWS.items()}

When = Literal["anywhere", "inside functions"]

# Where a library may be imported, by module or package, the longest name first; nowhere else. What is only imported
# inside functions costs nobody else its start.
LIBRARIES: Mapping[str, Mapping[str, When | None]] = {
    "torch": {
        "kernels": "anywhere",
        "kernels.cpu": None,
        "kernels.gpu.packed_layout": None,
        "kernels.gpu.pages": None,
        "kernels.gpu.signatures": None,
        "kernels.gpu.tile_attention": None,
        "kernels.gpu.tilings": None,
        "kernels.plain_attention_memory": None,
        "torch_models": "anywhere",
        "backends": "anywhere",
        "backends.cuda.quantized_planning": None,
        "backends.loading": "inside functions",
        "backends.plan": None,
        "backends.planning": None,
        "backends.torch.planning": None,
        "backends.torch_needed": None,
        "backends.memory": "inside functions",
        "backends.cuda.choices": None,
        "backends.cuda.quantized_weights": None,
        "backends.cuda.precompile_process": "inside functions",
        "backends.cuda.precompiling": None,
        "backends.jax": None,
        "backends.native": None,
        "backends.sampling.arrays": None,
        "backends.division": None,
        "backends.sampling.edits": None,
        "backends.outcome": None,
        "backends.page_rows": None,
        "backends.pooling": None,
        "backends.precision": None,
        "backends.sampling.random_key": None,
        "weights": "inside functions",
    },
    "jax": {"backends.jax": "anywhere", "backends.jax.layout": None, "backends.jax.shapes": None},
    "triton": {"kernels.gpu": "anywhere", "kernels.gpu.packed_layout": None, "kernels.gpu.tilings": None},
    "numpy": {
        "kernels": "anywhere",
        "kernels.cpu.library": None,
        "kernels.cpu.packed_layout": None,
        "kernels.cpu.program_spec": None,
        "models.rope_frequencies": "anywhere",
        "backends": "anywhere",
        "backends.native.lowering": None,
        "backends.native.support": None,
        "sources.crc64": "anywhere",
        "torch_models": "anywhere",
        "weights": "inside functions",
        "weights.affine": "anywhere",
        "weights.arrays": "anywhere",
        "weights.quantized": "anywhere",
    },
    "llguidance": {"grammar": "inside functions"},
    "tokenizers": {"text": "anywhere"},
    "jinja2": {"text.jinja_template": "anywhere", "measure.report": "anywhere"},
    "gguf": {"weights": "inside functions"},
    "safetensors": {"weights": "inside functions"},
    "tensorstore": {"weights": "inside functions"},
    "huggingface_hub": {"sources": "inside functions"},
    "boto3": {"sources": "inside functions"},
    "botocore": {"sources": "inside functions"},
    "google": {"sources": "inside functions"},
    "google_crc32c": {"sources": "inside functions"},
    "requests": {"sources": "inside functions"},
    "urllib3": {"sources": "inside functions"},
    "fastapi": {"server": "anywhere", "app": "anywhere"},
    "starlette": {"server": "anywhere", "ray": "anywhere"},
    "uvicorn": {"server": "anywhere"},
    "prometheus_client": {"server": "anywhere", "ray": "anywhere"},
    "opentelemetry": {"server.telemetry.tracing.tracer": "anywhere"},
    "httpx": {"client": "anywhere", "server.models.remote_prefill": "anywhere"},
    "anyio": {"client": "anywhere"},
    "ray": {"ray.application": "anywhere", "ray.router": "anywhere"},
    "lm_eval": {"evaluation": "anywhere"},
    # Development dependencies: the parity tests use them, an installed Ostro must not.
    "transformers": {},
    "peft": {},
}


@dataclass(frozen=True)
class Import:
    name: str
    """Dotted, down to the imported name: `from a import b` is a.b, be it a module or not."""
    line: int
    eager: bool
    """Whether importing the module runs it."""


def module_name(path: Path, source: Path) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(name: str) -> str:
    """The row of a module, or of anything in one; that of ostro itself is empty."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in PACKAGES else ""


def imports_of(tree: ast.AST, *, eager: bool = True) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, eager) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (Import(f"{node.module}.{alias.name}", node.lineno, eager) for alias in node.names)
        else:
            yield from imports_of(node, eager=eager and not _runs_later(node))


def _runs_later(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def violations(source: Path) -> list[str]:
    return [found for path in sorted((source / "ostro").rglob("*.py")) for found in _violations_of(path, source)]


def _violations_of(path: Path, source: Path) -> Iterator[str]:
    module = module_name(path, source)
    row = module.split(".")[1] if "." in module else ""
    if row not in PACKAGES:
        yield f"{module} is in no row of the table: add one"
        return
    for each in _all_imports(path.read_text()):
        top = each.name.split(".")[0]
        if top == "ostro":
            wrong = package_of(each.name) not in (row, *PACKAGES[row])
        else:
            when = _when(module, LIBRARIES[top]) if top in LIBRARIES else "anywhere"
            wrong = when is None or (each.eager and when == "inside functions")
        if wrong:
            yield f"{module}:{each.line} imports {each.name}"


def _when(module: str, places: Mapping[str, When | None]) -> When | None:
    within = [place for place in places if f"{module}.".startswith(f"ostro.{place}.")]
    return places[max(within, key=len)] if within else None


def circle(source: Path) -> list[str]:
    """Modules that import each other, the first of them again at the end; empty if there are none."""
    paths = {module_name(path, source): path for path in (source / "ostro").rglob("*.py")}
    graph = {module: {_module(each.name, paths) for each in _imports(path)} for module, path in paths.items()}
    try:
        TopologicalSorter({module: found - {module, ""} for module, found in graph.items()}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _imports(path: Path) -> Iterator[Import]:
    return (each for each in _all_imports(path.read_text()) if each.name.startswith("ostro."))


@cache
def _all_imports(code: str) -> tuple[Import, ...]:
    """Parsed once for all tests."""
    return tuple(imports_of(ast.parse(code)))


def _module(name: str, modules: Mapping[str, Path]) -> str:
    """The module that a name is in, or is."""
    return name if name in modules else name.rpartition(".")[0]


def plant(source: Path, file: str, code: str) -> str:
    """Writes a module into a source tree; returns its name."""
    path = source / "ostro" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    return module_name(path, source)


def test_every_import_points_down() -> None:
    assert violations(SOURCE) == []


def test_no_modules_import_each_other() -> None:
    """Not even inside functions: a module that cannot be read without another belongs to it."""
    assert circle(SOURCE) == []


def test_a_row_names_only_rows_above_it() -> None:
    rows = list(PACKAGES)
    wrong = {row: set(above) - set(rows[: rows.index(row)]) for row, above in PACKAGES.items()}
    assert not any(wrong.values()), wrong


def test_every_row_is_there_and_uses_what_it_may() -> None:
    """A permission that nobody needs is one that somebody will take."""
    used: dict[str, set[str]] = {row: set() for row in PACKAGES}
    found = set()
    for path in (SOURCE / "ostro").rglob("*.py"):
        row = package_of(module_name(path, SOURCE))
        found.add(row)
        used[row] |= {package_of(each.name) for each in _imports(path)} - {row}
    assert found == set(PACKAGES)
    assert used == {row: set(above) for row, above in PACKAGES.items()}


@pytest.mark.parametrize(
    ("file", "code", "found"),
    [
        ("engine/scheduler.py", "import torch", "1 imports torch"),
        ("engine/kv.py", "def f():\n    import torch.nn", "2 imports torch.nn"),
        ("engine/kv.py", "from numpy import ndarray", "1 imports numpy.ndarray"),
        ("engine/core.py", "from ostro.backends import fake", "1 imports ostro.backends.fake"),
        ("engine/core.py", "import ostro.text", "1 imports ostro.text"),
        ("engine/core.py", "from ostro import LLM", "1 imports ostro.LLM"),
        ("text/stream.py", "from ostro.engine.core import EngineCore", "1 imports ostro.engine.core.EngineCore"),
        ("models/llama.py", "from ostro.weights import Checkpoint", "1 imports ostro.weights.Checkpoint"),
        ("models/llama.py", "def f():\n    import torch", "2 imports torch"),
        ("kernels/linear.py", "from ostro.torch_models import rope", "1 imports ostro.torch_models.rope"),
        ("kernels/cpu/program.py", "import torch", "1 imports torch"),
        ("weights/checkpoint.py", "import torch", "1 imports torch"),
        ("weights/checkpoint.py", "try:\n    import torch\nfinally:\n    pass", "2 imports torch"),
        ("backends/native/load.py", "import torch", "1 imports torch"),
        ("backends/jax/mesh.py", "import torch", "1 imports torch"),
        ("backends/loading.py", "def f():\n    import jax", "2 imports jax"),
        ("sources/hub.py", "from ostro.weights import open_checkpoint", "1 imports ostro.weights.open_checkpoint"),
        ("client/calls.py", "from ostro.server.http import sse", "1 imports ostro.server.http.sse"),
        ("errors.py", "import ostro.config", "1 imports ostro.config"),
        ("cli/serve.py", "import transformers", "1 imports transformers"),
    ],
)
def test_planted_violation_is_found(tmp_path: Path, file: str, code: str, found: str) -> None:
    module = plant(tmp_path, file, code)
    assert violations(tmp_path) == [f"{module}:{found}"]


def test_module_without_a_row_is_found(tmp_path: Path) -> None:
    plant(tmp_path, "helpers.py", "")
    assert violations(tmp_path) == ["ostro.helpers is in no row of the table: add one"]


def test_planted_circle_is_found(tmp_path: Path) -> None:
    plant(tmp_path, "engine/kv.py", "from ostro.engine.radix import RadixCache")
    assert circle(tmp_path) == []
    plant(tmp_path, "engine/radix.py", "def f():\n    from ostro.engine import kv")
    assert set(circle(tmp_path)) == {"ostro.engine.kv", "ostro.engine.radix"}


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("backends/loading.py", "from ostro.engine.runner import RunnerSpec"),
        ("kernels/paged_attention.py", "import torch\nfrom ostro.models.architecture import AttentionSpec"),
        ("weights/checkpoint.py", "def load():\n    import torch"),
        ("weights/checkpoint.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
    ],
)
def test_import_within_the_rules_is_no_violation(tmp_path: Path, file: str, code: str) -> None:
    plant(tmp_path, file, code)
    assert violations(tmp_path) == []


@pytest.mark.parametrize(
    "module",
    [
        "ostro",
        "ostro.cli",
        "ostro.llm",
        "ostro.weights",
        "ostro.text.tokenizer",
        "ostro.engine.core",
        "ostro.backends.planning",
        "ostro.backends.loading",
        "ostro.backends.native.load",
        "ostro.engine_process.process",
        "ostro.pool.pool",
        "ostro.client.client",
        "ostro.server.lifecycle",
        "ostro.app",
    ],
)
def test_module_can_be_imported_without_torch(module: str) -> None:
    """What it imports by way of others counts too; so it is tried out."""
    code = f"import sys, {module}; print(*sorted({{'torch', 'transformers'}} & sys.modules.keys()))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout.strip(), ran.stderr) == (0, "", "")
