"""Imports point down only. The table below is the map; a module that is not on it, or leaves its layer, fails here."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"


@dataclass(frozen=True)
class Layer:
    ours: tuple[str, ...]
    """What it may import of Ostro, each with all below it."""
    never: tuple[str, ...] = ()
    """Libraries that it must not import."""
    lazily: tuple[str, ...] = ()
    """Libraries that it may import only where they are used, inside functions."""


_VALUES = ("ostro.errors", "ostro.sampling_params", "ostro.sampling_defaults", "ostro.config", "ostro.outputs")

# Lowest first. A package's line holds for all below it that have none of their own; that of "ostro" for itself alone.
LAYERS = {
    "ostro.errors": Layer(ours=(), never=("torch", "numpy")),
    "ostro.sampling_params": Layer(ours=("ostro.errors",), never=("torch", "numpy")),
    "ostro.sampling_defaults": Layer(ours=("ostro.errors", "ostro.sampling_params"), never=("torch", "numpy")),
    "ostro.config": Layer(ours=("ostro.errors",), never=("torch", "numpy")),
    "ostro.platforms": Layer(ours=("ostro.errors",), never=("torch", "numpy")),
    "ostro.machine": Layer(ours=(), never=("torch", "numpy")),
    "ostro.version": Layer(ours=(), never=("torch", "numpy")),
    "ostro.env_file": Layer(ours=("ostro.errors",), never=("torch", "numpy")),
    "ostro.extras": Layer(ours=(), never=("torch", "numpy")),
    "ostro.processes": Layer(ours=("ostro.processes",), never=("torch", "numpy")),
    "ostro.formats": Layer(ours=("ostro.formats", "ostro.errors"), lazily=("torch",)),
    "ostro.sources": Layer(
        ours=("ostro.sources", "ostro.formats", "ostro.errors", "ostro.extras", "ostro.processes"),
        never=("torch",),
        lazily=("google", "google_crc32c", "boto3", "botocore", "requests", "urllib3", "tqdm"),
    ),
    "ostro.weights": Layer(
        ours=(
            "ostro.formats",
            "ostro.weights",
            "ostro.models",
            "ostro.sources",
            "ostro.errors",
            "ostro.extras",
            "ostro.processes",
        ),
        lazily=("torch",),
    ),
    "ostro.text": Layer(
        ours=(
            "ostro.text",
            "ostro.processes",
            "ostro.errors",
            "ostro.sampling_params",
            "ostro.formats",
        ),
        never=("torch",),
    ),
    "ostro.kernels": Layer(ours=("ostro.kernels", "ostro.models", "ostro.errors")),
    # The native core: what runs on it starts without torch. Who only plans wants its library, and no arrays.
    "ostro.kernels.cpu": Layer(ours=("ostro.kernels.cpu", "ostro.errors"), never=("torch",)),
    "ostro.kernels.cpu.library": Layer(ours=("ostro.errors",), never=("torch", "numpy")),
    "ostro.kernels.cpu.packed_layout": Layer(ours=("ostro.kernels.cpu.library",), never=("torch", "numpy")),
    "ostro.kernels.cpu.program_spec": Layer(
        ours=("ostro.kernels.cpu.library", "ostro.errors"), never=("torch", "numpy")
    ),
    # What a model is, as data: read by everything that runs or measures one.
    "ostro.models": Layer(ours=("ostro.models", "ostro.errors"), never=("torch", "numpy")),
    "ostro.torch_models": Layer(ours=("ostro.torch_models", "ostro.models", "ostro.kernels", "ostro.errors")),
    # The seam between the engine and any device: it names the engine's batch, and the engine names it.
    "ostro.engine.runner": Layer(ours=("ostro.engine.batch",), never=("torch", "numpy")),
    "ostro.engine": Layer(
        ours=("ostro.engine", "ostro.engine.runner", "ostro.errors", "ostro.sampling_params"),
        never=("torch", "numpy", "tokenizers", "jinja2"),
    ),
    "ostro.runner": Layer(
        ours=(
            "ostro.runner",
            "ostro.engine.batch",
            "ostro.engine.request",
            "ostro.engine.runner",
            "ostro.engine.sequence",
            "ostro.kernels",
            "ostro.models",
            "ostro.torch_models",
            "ostro.formats",
            "ostro.weights",
            "ostro.machine",
            *_VALUES,
        )
    ),
    # A model that was packed before starts, and draws its tokens, without torch.
    "ostro.runner.load": Layer(
        ours=(
            "ostro.runner",
            "ostro.engine.runner",
            "ostro.models",
            "ostro.torch_models",
            "ostro.formats",
            "ostro.weights",
            "ostro.machine",
            *_VALUES,
        ),
        lazily=("torch",),
    ),
    "ostro.runner.precision": Layer(ours=(), never=("torch", "numpy")),
    "ostro.runner.outcome": Layer(ours=("ostro.engine.runner",), never=("torch", "numpy")),
    "ostro.runner.random_key": Layer(ours=(), never=("torch",)),
    "ostro.runner.native": Layer(
        ours=(
            "ostro.runner",
            "ostro.engine.batch",
            "ostro.engine.request",
            "ostro.engine.runner",
            "ostro.engine.sequence",
            "ostro.kernels.cpu",
            "ostro.models",
            "ostro.torch_models",
            "ostro.sources",
            "ostro.formats",
            "ostro.weights",
            "ostro.machine",
            *_VALUES,
        ),
        lazily=("torch",),
    ),
    "ostro.runner.native.support": Layer(
        ours=("ostro.kernels.cpu.library", "ostro.models.architecture", "ostro.models.registry"),
        never=("torch", "numpy"),
    ),
    "ostro.runner.native.lowering": Layer(
        ours=(
            "ostro.kernels.cpu.library",
            "ostro.kernels.cpu.packed_layout",
            "ostro.kernels.cpu.program_spec",
            "ostro.models.architecture",
            "ostro.models.rope_settings",
            "ostro.runner.native.support",
            "ostro.formats.gguf_header",
        ),
        never=("torch", "numpy"),
    ),
    "ostro.runner.native.packing": Layer(
        ours=(
            "ostro.kernels.cpu",
            "ostro.models",
            "ostro.torch_models",
            "ostro.runner.native",
            "ostro.formats",
            "ostro.weights",
            "ostro.errors",
        ),
    ),
    # The engine process and the API process's end of it: the one place that puts engine, runner and weights together.
    "ostro.engine_process": Layer(
        ours=(
            "ostro.engine_process",
            "ostro.engine",
            "ostro.runner",
            "ostro.sources",
            "ostro.formats",
            "ostro.weights",
            "ostro.errors",
            "ostro.sampling_params",
            "ostro.config",
            "ostro.processes",
            "ostro.processes",
        ),
        never=("numpy",),
        lazily=("torch",),
    ),
    # What loading will take, by files alone.
    "ostro.planning": Layer(
        ours=(
            "ostro.planning",
            "ostro.kernels.cpu.library",
            "ostro.models.architecture",
            "ostro.models.registry",
            "ostro.runner.memory",
            "ostro.runner.native.lowering",
            "ostro.runner.native.support",
            "ostro.runner.precision",
            "ostro.sources",
            "ostro.formats",
            "ostro.weights",
            "ostro.machine",
            "ostro.errors",
            "ostro.config",
        ),
        never=("torch", "numpy"),
    ),
    "ostro.pool": Layer(
        ours=(
            "ostro.pool",
            "ostro.engine_process.handle",
            "ostro.engine_process.messages",
            "ostro.errors",
            "ostro.config",
        ),
        never=("torch", "numpy"),
    ),
    "ostro.evaluation": Layer(ours=("ostro.llm", "ostro.extras", *_VALUES), never=("torch", "numpy")),
    "ostro.outputs": Layer(ours=("ostro.engine.runner", "ostro.errors"), never=("torch", "numpy")),
    "ostro.frontend": Layer(
        ours=(
            "ostro.sources",
            "ostro.engine.request",
            "ostro.engine.scheduler",
            "ostro.engine.sequence",
            "ostro.text",
            "ostro.formats",
            "ostro.weights",
            *_VALUES,
        ),
        never=("torch",),
    ),
    # Requests on an engine in this process: whose turn it is to step.
    "ostro.driver": Layer(
        ours=("ostro.frontend", "ostro.engine", "ostro.errors", "ostro.outputs"), never=("torch", "numpy")
    ),
    "ostro.llm": Layer(
        ours=(
            "ostro.driver",
            "ostro.frontend",
            "ostro.engine",
            "ostro.runner",
            "ostro.sources",
            "ostro.text",
            "ostro.formats",
            "ostro.weights",
            *_VALUES,
        ),
        lazily=("torch",),
    ),
    # Text in, text out, for many callers: joins the frontend and the engine's handle.
    "ostro.server.service": Layer(
        ours=(
            "ostro.engine.admission",
            "ostro.engine_process.handle",
            "ostro.engine_process.messages",
            "ostro.engine.request",
            "ostro.engine_process.engine_counters",
            "ostro.frontend",
            "ostro.text",
            "ostro.formats",
            "ostro.weights",
            *_VALUES,
        ),
        never=("torch",),
    ),
    # What crosses the wire: the server's side of it and the client's read the same classes.
    "ostro.schemas": Layer(
        ours=("ostro.schemas", "ostro.errors", "ostro.sampling_params", "ostro.sampling_defaults"),
        never=("torch", "numpy", "fastapi", "starlette", "uvicorn"),
    ),
    # The HTTP side: it answers while a model loads, so it can do without torch.
    "ostro.server": Layer(
        ours=(
            "ostro.server",
            "ostro.schemas",
            "ostro.pool",
            "ostro.text",
            "ostro.engine.runner",
            "ostro.engine.request",
            "ostro.engine.counters",
            "ostro.engine_process.engine_counters",
            "ostro.processes",
            *_VALUES,
        ),
        never=("torch",),
    ),
    # They show what the engine tells of itself.
    "ostro.server.metrics": Layer(
        ours=("ostro.server.auth", "ostro.engine.counters", "ostro.server.logging", "ostro.engine_process.messages"),
        never=("torch",),
    ),
    # Requests as spans. One module of it needs opentelemetry, and is imported only where requests are traced.
    "ostro.server.tracing": Layer(
        ours=("ostro.server.tracing", "ostro.server.logging", "ostro.errors", "ostro.extras"),
        never=("torch", "numpy", "opentelemetry"),
    ),
    "ostro.server.tracing.tracer": Layer(
        ours=("ostro.server.tracing.spans", "ostro.server.logging"), never=("torch", "numpy")
    ),
    "ostro.server.lifecycle": Layer(
        ours=("ostro.server", "ostro.pool", "ostro.engine_process.messages", "ostro.version", *_VALUES),
        never=("torch",),
    ),
    "ostro.server.settings": Layer(
        ours=("ostro.server", "ostro.pool", "ostro.machine", "ostro.env_file", *_VALUES),
        never=("torch", "numpy"),
    ),
    # Levanter's YAML, which the reader of its checkpoints knows how to load.
    "ostro.server.levanter_training": Layer(
        ours=("ostro.config", "ostro.weights.levanter_yaml", "ostro.errors"), never=("torch", "numpy")
    ),
    # Files for the pool, by way of a process of their own.
    "ostro.server.model_files": Layer(
        ours=(
            "ostro.pool",
            "ostro.sources",
            "ostro.formats",
            "ostro.weights",
            "ostro.errors",
            "ostro.config",
            "ostro.processes",
            "ostro.processes",
        ),
        never=("torch",),
    ),
    # From settings to a pool of models.
    "ostro.server.build_models": Layer(
        ours=(
            "ostro.server",
            "ostro.pool",
            "ostro.planning",
            "ostro.frontend",
            "ostro.machine",
            "ostro.sources",
            "ostro.formats",
            "ostro.weights",
            *_VALUES,
        ),
        never=("torch",),
    ),
    # The HTTP API from the other side: the wire's objects, and nothing of what is behind them.
    "ostro.client": Layer(
        ours=("ostro.client", "ostro.schemas", "ostro.errors"),
        never=("torch", "numpy", "fastapi", "starlette", "uvicorn"),
    ),
    # What reports of measurements have in common.
    "ostro.report": Layer(ours=("ostro.report",), never=("torch", "numpy")),
    # Load on a server over HTTP.
    "ostro.bench": Layer(
        ours=(
            "ostro.bench",
            "ostro.client.events",
            "ostro.client.failures",
            "ostro.report",
            "ostro.errors",
            "ostro.version",
        ),
        never=("torch", "numpy", "httpx"),
    ),
    # Other servers over HTTP, and models in this process, as their users see them.
    "ostro.compare": Layer(
        ours=(
            "ostro.compare",
            "ostro.report",
            "ostro.client",
            "ostro.llm",
            "ostro.frontend",
            "ostro.engine.request",
            "ostro.engine.runner",
            "ostro.formats",
            "ostro.weights",
            *_VALUES,
        ),
        never=("torch", "numpy", "httpx"),
    ),
    # On a cluster: the server's parts, asked by calls. Ray is an extra, and only two modules know it.
    "ostro.ray": Layer(
        ours=("ostro.ray", "ostro.server", "ostro.schemas", "ostro.pool", "ostro.errors"), never=("torch", "ray")
    ),
    "ostro.ray.application": Layer(ours=("ostro.ray", "ostro.server", "ostro.extras"), never=("torch",)),
    "ostro.ray.router": Layer(ours=("ostro.ray",), never=("torch",)),
    "ostro.ray.data": Layer(ours=("ostro.llm", *_VALUES), never=("torch", "ray")),
    # The server's parts under an ASGI server of somebody else's.
    "ostro.app": Layer(ours=("ostro.server", "ostro.env_file", "ostro.errors"), never=("torch", "numpy")),
    "ostro.cli": Layer(ours=("ostro",), lazily=("torch",)),
    "ostro.__main__": Layer(ours=("ostro.cli",), never=("torch", "numpy")),
    "ostro": Layer(ours=("ostro.llm", "ostro.client", "ostro.version", *_VALUES), never=("torch", "numpy")),
}

# Development dependencies: the parity tests use them, an installed Ostro must not.
NOWHERE = ("transformers", "peft")


@dataclass(frozen=True)
class Import:
    name: str
    """Dotted, down to the imported name: `from a import b` is a.b, be it a module or not."""
    line: int
    eager: bool
    """Whether importing the module runs it."""

    def within(self, prefixes: tuple[str, ...]) -> bool:
        return any(self.name == prefix or self.name.startswith(prefix + ".") for prefix in prefixes)


def module_name(path: Path, source: Path) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> Layer | None:
    names = [name for name in LAYERS if module == name or (name != "ostro" and module.startswith(name + "."))]
    return LAYERS[max(names, key=len)] if names else None


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
    layer = layer_of(module)
    if layer is None:
        yield f"{module} is in no layer: add it to the table"
        return
    for each in imports_of(ast.parse(path.read_text())):
        if each.within(("ostro",)):
            wrong = not each.within(layer.ours)
        else:
            wrong = each.within((*layer.never, *NOWHERE)) or (each.eager and each.within(layer.lazily))
        if wrong:
            yield f"{module}:{each.line} imports {each.name}"


def plant(source: Path, file: str, code: str) -> str:
    """Writes a module into an empty source tree; returns its name."""
    path = source / "ostro" / file
    path.parent.mkdir(parents=True)
    path.write_text(code)
    return module_name(path, source)


def test_every_import_points_down() -> None:
    assert violations(SOURCE) == []


@pytest.mark.parametrize(
    ("file", "code", "found"),
    [
        ("engine/scheduler.py", "import torch", "1 imports torch"),
        ("engine/kv.py", "def f():\n    import torch.nn", "2 imports torch.nn"),
        ("engine/kv.py", "from numpy import ndarray", "1 imports numpy.ndarray"),
        ("engine/core.py", "from ostro.runner import fake", "1 imports ostro.runner.fake"),
        ("engine/core.py", "import ostro.text", "1 imports ostro.text"),
        ("engine/core.py", "from ostro import LLM", "1 imports ostro.LLM"),
        ("text/stops.py", "from ostro.engine.core import EngineCore", "1 imports ostro.engine.core.EngineCore"),
        ("models/llama.py", "from ostro.weights import Checkpoint", "1 imports ostro.weights.Checkpoint"),
        ("kernels/linear.py", "from ostro.torch_models import rope", "1 imports ostro.torch_models.rope"),
        ("weights/checkpoint.py", "import torch", "1 imports torch"),
        ("weights/checkpoint.py", "try:\n    import torch\nfinally:\n    pass", "2 imports torch"),
        ("runner/sampler.py", "from ostro.engine.kv import KVCache", "1 imports ostro.engine.kv.KVCache"),
        ("errors.py", "import ostro.config", "1 imports ostro.config"),
        ("cli/serve.py", "import transformers", "1 imports transformers"),
    ],
)
def test_planted_violation_is_found(tmp_path: Path, file: str, code: str, found: str) -> None:
    module = plant(tmp_path, file, code)
    assert violations(tmp_path) == [f"{module}:{found}"]


def test_module_without_a_layer_is_found(tmp_path: Path) -> None:
    plant(tmp_path, "helpers.py", "")
    assert violations(tmp_path) == ["ostro.helpers is in no layer: add it to the table"]


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("engine/scheduler.py", "from ostro.engine.runner import RunnerSpec"),
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
        "ostro.planning",
        "ostro.runner.load",
        "ostro.server.lifecycle",
        "ostro.app",
    ],
)
def test_module_can_be_imported_without_torch(module: str) -> None:
    """What it imports by way of others counts too; so it is tried out."""
    code = f"import sys, {module}; print(*sorted({{'torch', 'transformers'}} & sys.modules.keys()))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout.strip(), ran.stderr) == (0, "", "")
