"""Classes of holes that were found in other inference servers, in what files of models and numbers from outside can do:
one test a class, named by it. Where a class has tests of its own elsewhere, its essential case stands here, too.

`test_peers_cves.py` has the classes that need no files: requests, keys and sockets.
"""

import ast
import json
import math
import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from ctypes import addressof, byref, c_char, create_string_buffer
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest
import torch
from checkout import ROOT
from every_family import TINY
from gguf_factory import write_gguf as write_model_gguf
from model_directory import write_model
from native_directory import generate, load, packed_files
from native_directory import write as write_native
from native_models import needs_library
from sampler_oracle import make_seq
from text_vocabs import sentencepiece_pieces, write_gguf
from tokenizer_parts import BYTES

from ostro.backends.native.runner import NativeRunner
from ostro.backends.sampling.arrays import edit
from ostro.backends.sampling.sampler import sample
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.errors import BadCheckpoint, BadRequest, OstroError
from ostro.formats.gguf_header import GGML_TYPES, read_gguf_header
from ostro.kernels.cpu.library import (
    CBatch,
    CBuffer,
    CMatrix,
    CPiece,
    CShape,
    CStep,
    Op,
    instruction_sets,
    library,
    panel_of,
)
from ostro.models.registry import describe
from ostro.sampling_params import PARAMETERS, SamplingParams
from ostro.server.settings import Given, ServeSettings, read_settings
from ostro.sources.files import VOCABULARIES
from ostro.text.pairs import pair_prompt
from ostro.text.tokenizer import Tokenizer
from ostro.weights import open_checkpoint

SOURCE = ROOT / "src" / "ostro"

# --- templates that run where they should not ------------------------------------------------------------------------

BOMB = "{{ 'a' * 10 ** 10 }}"
"""Ten gigabytes, where nothing limits it."""


def gguf_template(directory: Path, template: str) -> Path:
    pieces, types, scores = sentencepiece_pieces()
    return write_gguf("llama", pieces, types, scores=scores, template=template)


def config_template(directory: Path, template: str) -> Path:
    return write_model(directory, chat_template=template)


def file_template(directory: Path, template: str) -> Path:
    write_model(directory)
    (directory / "chat_template.jinja").write_text(template)
    return directory


def tool_template(directory: Path, template: str) -> Path:
    write_model(directory)
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text(template)
    return directory


@pytest.mark.cases(2)
@pytest.mark.parametrize("write", [gguf_template, config_template, file_template, tool_template])
def test_templates_of_models_run_in_the_limited_process_only(
    write: Callable[[Path, str], Path], tmp_path: Path
) -> None:
    """CVE-2024-34359 and its like: a template of a GGUF file ran in the server's own process."""
    hello = [{"role": "user", "content": "Hello"}]
    tokenizer = Tokenizer.load(write(tmp_path / "model", BOMB))
    with pytest.raises(BadRequest, match=r"memory|too much|limit|longer"):
        tokenizer.encode_chat(hello, tools=[{"type": "function", "function": {"name": "f"}}])
    tokenizer.close()


def test_prompts_of_rerankers_run_in_the_limited_process_only(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(config_template(tmp_path / "model", BOMB))
    with pytest.raises(OstroError, match=r"memory|too much|limit|longer"):
        pair_prompt(tokenizer.renderer, lambda query, document: [{"role": "user", "content": query + document}])
    tokenizer.close()


@pytest.mark.full
def test_jinja_is_imported_where_templates_are_rendered_only() -> None:
    """But for the page of a report, whose template is our own."""
    assert {name for name, tree in sources().items() if "jinja2" in imported(tree)} == {
        "measure/report/page.py",
        "text/jinja_template.py",
    }


# --- code that comes with a model -------------------------------------------------------------------------------------

EVIL = "import pathlib; pathlib.Path(__file__).with_name('ran').touch()\n"
REMOTE = {
    name: f"evil.{name}"
    for name in ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer", "AutoProcessor")
}


def test_code_that_a_model_names_is_never_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto_map` of the model, its tokenizer, its processor and a draft model, with `trust_remote_code` everywhere."""
    directory = write_model(tmp_path)
    monkeypatch.syspath_prepend(str(directory))
    for name in ("evil", "modeling_evil", "tokenization_evil", "conftest_evil", "__init__"):
        (directory / f"{name}.py").write_text(EVIL)
    remote = {"auto_map": REMOTE, "trust_remote_code": True, "custom_pipelines": {"evil": {"impl": "evil.Pipeline"}}}
    for name in ("config.json", "tokenizer_config.json"):
        path = directory / name
        path.write_text(json.dumps(json.loads(path.read_text()) | remote | {"tokenizer_class": "evil.Tokenizer"}))
    for name in ("processor_config.json", "preprocessor_config.json", "generation_config.json", "draft_config.json"):
        (directory / name).write_text(json.dumps(remote | {"custom_generate": "evil", "speculators_config": remote}))
    checkpoint = open_checkpoint(directory)
    describe(checkpoint.config)
    Tokenizer.load(directory)
    load(directory)
    assert not (directory / "ran").exists()
    assert not {name for name in sys.modules if "evil" in name}


@pytest.mark.full
def test_nothing_is_imported_evaluated_or_compiled_by_a_name_from_outside() -> None:
    """Modules are imported by names that stand in the source, or in tables there; code is never made of text."""
    found: dict[str, set[str]] = {}
    for path, tree in sources().items():
        for name in {called(node) for node in ast.walk(tree) if isinstance(node, ast.Call)}:
            if name in ("exec", "eval", "compile", "__import__", "import_module"):
                found.setdefault(name, set()).add(path)
    assert found == {
        "import_module": {
            *("__init__.py", "cli/__init__.py", "cli/completion.py", "kernels/gpu/signatures.py", "models/registry.py"),
            *("server/app.py", "server/dialects/registry.py"),
        }
    }


def test_downloads_hold_no_code() -> None:
    from ostro.sources import hub

    patterns = (*hub._FILES, *hub._PICKLES, *VOCABULARIES)
    assert not [each for each in patterns if each.endswith((".py", ".so", "*", ".pt", ".pkl"))]


# --- numbers that nobody bounded --------------------------------------------------------------------------------------

COUNTS = (2**31, 2**63, 2**64, 10**30)


@pytest.mark.parametrize("family", [name for name, config in TINY.items() if "num_hidden_layers" in config])
def test_counts_in_configs_are_bounded(family: str) -> None:
    """Lists, tables and loops were as long as a config said."""
    for name, value in TINY[family].items():
        for count in COUNTS if type(value) is int else ():
            if name != "query_pre_attn_scalar":
                with pytest.raises(BadCheckpoint, match=f"'{name}'"):
                    describe({**TINY[family], name: count})


def test_a_vocabulary_without_a_tokenizer_is_bounded() -> None:
    from ostro.text.model_tokenizer import IdTokenizer

    with pytest.raises(BadCheckpoint, match="highest token id"):
        IdTokenizer(10**12)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "-1", "1e999", "-0.5"])
def test_negative_and_non_finite_numbers_of_a_config_are_refused(tmp_path: Path, number: str) -> None:
    """Python's JSON takes NaN and Infinity, and calls 1e999 infinite."""
    path = write_model(tmp_path) / "config.json"
    config = json.loads(path.read_text())
    for name in (name for name, value in config.items() if type(value) in (int, float)):
        path.write_text(json.dumps(config | {name: "HERE"}).replace('"HERE"', number))
        with pytest.raises(BadCheckpoint, match=f"'{name}'"):
            describe(open_checkpoint(tmp_path).config)


NUMERIC = sorted(
    name
    for name, each in ServeSettings.model_fields.items()
    # Any integer is a seed.
    if name != "seed"
    and {int, float}
    & {each.annotation, *get_args(each.annotation), *(a for b in get_args(each.annotation) for a in get_args(b))}
)


@pytest.mark.full
@pytest.mark.parametrize("source", ["yaml", "command line"])
def test_negative_and_non_finite_numbers_of_an_operator_are_refused(source: str, tmp_path: Path) -> None:
    """A timeout of NaN never ends, and one of -1 always has."""
    assert len(NUMERIC) > 30
    for name in NUMERIC:
        for number in (".nan", ".inf", "-.inf", "-1", "1e999", "-0.5"):
            given: dict[str, Given] = {}
            config = tmp_path / "ostro.yaml"
            config.write_text(f"{name}: {number}\n" if source == "yaml" else "")
            if source == "command line":
                given = {name: Given(number.replace(".nan", "nan").replace(".inf", "inf"), f"--{name}")}
            with suppress(OstroError):
                value = getattr(read_settings(given, config=config, directory=tmp_path).settings, name)
                # Levanter's -1 devices are all of them.
                assert value in (None, "auto") or (math.isfinite(value) and value >= 0), (name, number, value)


EXTREMES: dict[str, tuple[float, ...]] = {
    name: (1e-320, 1e-45, 1e-39, 1e-30, each.low or 0.0, (each.low or 0.0) + 1e-12, each.high or 1.0, -1e-320)
    for name, each in PARAMETERS.items()
    if SamplingParams.__annotations__[name] is float
}


@pytest.mark.parametrize("name", [*EXTREMES, "logit_bias"])
def test_denormal_and_extreme_numbers_of_a_request_are_refused_or_harmless(name: str) -> None:
    """`repetition_penalty` of 1e-39 made infinity of a score, and the answer blamed the weights."""
    scores = torch.linspace(-60.0, 60.0, 40)[None]
    for value in EXTREMES.get(name, (1e-320, -1e-320, 1e-39, 100.0, -100.0)):
        for temperature in (0.0, 0.7):
            settings: dict[str, object] = {
                "temperature": temperature,
                name: {3: value} if name == "logit_bias" else value,
            }
            with suppress(BadRequest):
                seq = make_seq(seed=3, prompt=(0, 5, 39), output=(1, 38), **settings)  # type: ignore[arg-type]
                [drawn] = sample(scores, [seq])
                assert drawn.error is None, (name, value)
                edited = scores.numpy().copy()
                edit(edited, [(0, seq)])
                assert np.isfinite(edited.max()), (name, value)
                assert not np.isnan(edited).any(), (name, value)


# --- integers that wrap -----------------------------------------------------------------------------------------------


def text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def header(*, tensors: int = 0, entries: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, entries) + rest


def tensor(*dims: int, kind: int = 0, offset: int = 0) -> bytes:
    return header(
        tensors=1, rest=text(b"t") + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset) + bytes(64)
    )


WRAPPING = {
    "product of two dimensions": tensor(2**32, 2**32),
    "product of four dimensions": tensor(2**16, 2**16, 2**16, 2**16 + 1),
    "bytes of a product": tensor(2**62, 1, 1),
    "end of a tensor": tensor(8, offset=2**64 - 32),
    "signed offset": tensor(8, offset=2**63),
    "blocks": tensor(2**63, kind=8),
    "length of a text": header(entries=1, rest=struct.pack("<Q", 2**64 - 8) + bytes(64)),
    "length of an array": header(entries=1, rest=text(b"k") + struct.pack("<IIQ", 9, 10, 2**61 + 1) + bytes(64)),
    "number of tensors": header(tensors=2**64 // 24 + 1, rest=bytes(64)),
    "number of entries": header(entries=2**64 - 1, rest=bytes(64)),
}


@pytest.mark.parametrize("name", WRAPPING)
def test_integers_of_gguf_files_wrap_in_no_reader(tmp_path: Path, name: str) -> None:
    """CVE-2025-53630 and its like: a product or a sum that wraps passes the check of the file's size."""
    path = tmp_path / "model.gguf"
    path.write_bytes(WRAPPING[name])
    with pytest.raises(BadCheckpoint, match="damaged"):
        read_gguf_header(path)


@needs_library
def test_integers_of_packed_matrices_wrap_not_in_the_native_reader() -> None:
    """The core's reader of packed weights is given rows and columns by a file, and sizes follow from these."""
    lib = library()
    for rows, cols in (
        (2**31 - 16, 2**31 - 32),
        (2**30, 2**30),
        (65536, 65536),
        (-16, 32),
        (16, -32),
        (0, 32),
        (16, 0),
    ):
        for codes in range(-1, 8):
            matrix = CMatrix(rows=rows, cols=cols, codes=codes)
            size = lib.ostro_packed_bytes(byref(matrix), 16)
            assert size == -1 or size >= rows * cols // 2, (rows, cols, codes, size)
            assert (rows > 0 and cols > 0) or size == -1


# --- memory that was never written ------------------------------------------------------------------------------------

PACK = """
import hashlib, sys
from pathlib import Path
from ostro.backends.loading import load_runner
from ostro.config import EngineConfig
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.sampling_params import SamplingParams
from ostro.weights import open_checkpoint

directory, cache, quantize = sys.argv[1:]
config = EngineConfig(model=directory, device="cpu", kv_memory=4 << 20, quantize=quantize)
core = EngineCore(load_runner(open_checkpoint(Path(directory)), config))
params = SamplingParams(max_tokens=6, temperature=0, logprobs=3)
core.add(Request(id=0, prompt_ids=tuple(range(9)), params=params, seed=0))
while core.has_work:
    print([(gain.token_ids, gain.logprobs) for gain in core.step()])
for path in sorted(Path(cache).rglob("*.ostro")):
    print("packed", hashlib.sha256(path.read_bytes()).hexdigest())
"""


def poisoned(directory: Path, cache: Path, byte: int, quantize: str) -> str:
    """What a process says whose allocator fills fresh memory with a byte."""
    poison = {"MALLOC_PERTURB_": str(byte), "GLIBC_TUNABLES": f"glibc.malloc.perturb={byte}"}
    done = subprocess.run(
        [sys.executable, "-c", PACK, str(directory), str(cache), quantize],
        env={**os.environ, **poison, "OSTRO_CACHE": str(cache), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout


@pytest.mark.full
@needs_library
@pytest.mark.parametrize("quantize", ["none", pytest.param("int4", marks=pytest.mark.full)])
def test_no_byte_of_the_heap_gets_into_packed_weights_or_answers(tmp_path: Path, quantize: str) -> None:
    """With the heap full of other bytes, a model is packed to the same bytes and says the same."""
    # Widths that leave parts of panels empty, where there could be anything.
    model = write_native(tmp_path / "model", {**TINY["llama"], "vocab_size": 50, "hidden_size": 64, "head_dim": 16})
    first, second = (poisoned(model, tmp_path / f"cache{byte}", byte, quantize) for byte in (0xA5, 0x5A))
    assert first == second
    assert first.count("packed") == 1


@needs_library
def test_a_truncated_file_gives_no_bytes_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a file lacks is nowhere: it is refused before anything is read, and nothing is packed."""
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path / "cache"))
    model = write_native(tmp_path / "model")
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    gguf = tmp_path / "model.gguf"
    write_model_gguf(gguf, "llama", {"llama.block_count": 1}, {"token_embd.weight": np.ones((64, 64), np.float32)})
    whole_gguf = gguf.read_bytes()
    for share in (0.0, 0.2, 0.5, 0.9, 0.999):
        weights.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(BadCheckpoint):
            load(model)
        gguf.write_bytes(whole_gguf[: int((len(whole_gguf) - 32) * share)])
        with pytest.raises(BadCheckpoint):
            read_gguf_header(gguf)
    assert packed_files() == []


# --- more than 2^31 elements ------------------------------------------------------------------------------------------

COLS = 8192
# Python has no name for it yet.
MAP_NORESERVE = 0x4000


class Sparse:
    """A packed matrix of zeros, all but its last panel: memory that is never written takes none."""

    def __init__(self, kind: str, bits: int, values: npt.NDArray[Any]) -> None:
        lib, panel = library(), len(values)
        source = next(number for number, each in GGML_TYPES.items() if each.name == kind)
        small = CMatrix(rows=panel, cols=COLS)
        last = np.zeros(lib.ostro_format(source, bits, byref(small)), np.uint8)
        rows = np.array([row.ctypes.data for row in values], np.uint64)
        lib.ostro_pack(source, rows.ctypes.data, byref(small), panel, 1, last.ctypes.data)
        lib.ostro_point(byref(small), last.ctypes.data)
        count = (2**32 // COLS // panel + 1) * panel
        self.matrix = CMatrix(rows=count, cols=COLS)
        size = lib.ostro_format(source, bits, byref(self.matrix))
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        self._held = c_char.from_buffer(self._memory)
        lib.ostro_point(byref(self.matrix), addressof(self._held))
        for part in ("data", "scale_data", "minimum_data"):
            self._write(part, small, last, count // panel)

    def _write(self, part: str, small: CMatrix, last: npt.NDArray[np.uint8], panels: int) -> None:
        starts = [getattr(small, each) - small.data for each in ("data", "scale_data", "minimum_data")]
        begin = getattr(small, part) - small.data
        end = min([each for each in starts if each > begin], default=len(last))
        # Parts are aligned: of a single panel, none is padded, as columns are many.
        at = getattr(self.matrix, part) - self.matrix.data + (panels - 1) * (end - begin)
        self._memory[at : at + end - begin] = last[begin:end].tobytes()

    def close(self) -> None:
        del self._held
        self._memory.close()


@pytest.mark.full
@needs_library
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not lend more memory than they have")
@pytest.mark.parametrize(("kind", "bits"), [("F32", 8), ("F32", 4), ("F16", 0)])
def test_matrices_of_more_than_two_to_the_31_values_are_read_where_they_are(kind: str, bits: int) -> None:
    """An index of 32 bits wraps: the last rows were read from the beginning, or from before it."""
    isa = instruction_sets()[0]
    panel = panel_of(isa)
    values = np.random.default_rng(1).integers(-7, 8, (panel, COLS)).astype(np.float16 if kind == "F16" else np.float32)
    matrix = Sparse(kind, bits, values)
    rows = matrix.matrix.rows
    assert rows * COLS > 2**32
    lib, found = library(), np.empty(COLS, np.float32)
    lib.ostro_unpack_row(byref(matrix.matrix), panel, rows - 1, found.ctypes.data)
    np.testing.assert_allclose(found, values[-1], atol=0.6)
    embedded, product = looked_up(isa, matrix.matrix, token=rows - 1)
    np.testing.assert_array_equal(embedded, found)
    np.testing.assert_allclose(product[-1], float(found @ found), rtol=0.02)
    assert not product[:-panel].any()
    matrix.close()


def looked_up(isa: str, matrix: CMatrix, token: int) -> tuple[npt.NDArray[np.float32], ...]:
    """The kernels' row of a token, and all rows' products with it."""
    from ctypes import c_float

    lib = library()
    shape = CShape(heads=1, kv_heads=1, head_dim=16, num_layers=1, num_pages=1, cells=0, max_rows=1, threads=1)
    buffers = (CBuffer * 2)(CBuffer(1, COLS), CBuffer(1, matrix.rows))
    steps = (CStep * 2)(
        CStep(op=Op.EMBED, out=0, cols=COLS, scale=1.0, matrix=addressof(matrix)),
        CStep(op=Op.LINEAR, input=0, out=1, cols=COLS, matrix=addressof(matrix)),
    )
    why = create_string_buffer(400)
    plan = lib.ostro_plan(isa.encode(), byref(shape), buffers, 2, None, 0, steps, 2, why, len(why))
    assert plan, why.value
    tokens, pages = np.array([token], np.int32), np.zeros(1, np.int32)
    piece = CPiece(0, 0, 1, 1, pages.ctypes.data)
    batch = CBatch(num_rows=1, num_pieces=1, tokens=tokens.ctypes.data, pieces=addressof(piece))
    refusal = lib.ostro_run(plan, byref(batch), 0, 2)
    assert refusal is None, refusal
    found = tuple(
        np.ctypeslib.as_array((c_float * each.cols).from_address(lib.ostro_buffer(plan, number))).copy()
        for number, each in enumerate(buffers)
    )
    lib.ostro_free(plan)
    return found


# --- ids beyond the tables --------------------------------------------------------------------------------------------

FAR = (-1, -(2**31), 2**31 - 1, 2**31, 2**63, 10**30)


@needs_library
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_ids_beyond_the_vocabulary_reach_no_table(tmp_path: Path, backend: str) -> None:
    """Those of prompts, and of drafts, which come from a prediction of the output."""
    runner = load(write_native(tmp_path), backend=backend)
    core = EngineCore(runner)
    params = SamplingParams(max_tokens=4, temperature=0)
    vocab = runner.spec.vocab_size
    for token in (*FAR, vocab):
        for request, param in (
            (Request(id=1, prompt_ids=(1, token), params=params, seed=0), "prompt"),
            (Request(id=1, prompt_ids=(1, 2), params=params, seed=0, predicted_ids=(1, token)), "prediction"),
        ):
            with pytest.raises(BadRequest, match=f"holds token id {token}"):
                core.add(request)
            assert param
    assert len(generate(runner)) == 6


@needs_library
@pytest.mark.parametrize("token", [-1, 64, 2**31 - 1, -(2**31)])
def test_the_native_core_itself_refuses_ids_beyond_its_tables(tmp_path: Path, token: int) -> None:
    from ostro.kernels.cpu.program import Piece

    runner = load(write_native(tmp_path, {**TINY["llama"], "vocab_size": 64, "hidden_size": 64, "head_dim": 16}))
    assert isinstance(runner, NativeRunner)
    with pytest.raises(AssertionError, match="token"):
        runner.program.run(np.array([token], np.int32), [Piece(0, 0, 1, np.zeros(1, np.int32))], np.zeros(1, np.int32))


def test_ids_that_a_tokenizer_lacks_have_no_bytes(tmp_path: Path) -> None:
    """Logits may be wider than the vocabulary, and clients send ids to be decoded."""
    tokenizer = Tokenizer.load(write_model(tmp_path))
    for token in (*FAR, tokenizer.vocab_size):
        assert tokenizer.token_bytes(token) == b""
        assert tokenizer.decode([token]) == ""


def test_special_tokens_of_a_file_are_ids_of_its_vocabulary(tmp_path: Path) -> None:
    """Those of a post-processor are written into the prompt as they stand; the engine refuses them."""
    directory = write_model(tmp_path)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2**31, 10**30, -1, 1]}))
    assert Tokenizer.load(directory).eos_ids >= {1}
    assert max(Tokenizer.load(directory).eos_ids) < 1 << 24
    model = {"type": "BPE", "vocab": {"a": 0, "b": 2**32 - 1}, "merges": []}
    (directory / "tokenizer.json").write_text(json.dumps({"decoder": BYTES, "model": model}))
    with pytest.raises(BadCheckpoint, match="highest token id is 4294967295"):
        Tokenizer.load(directory)


# --- pickle -----------------------------------------------------------------------------------------------------------

_PICKLING = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "multiprocessing.connection"}


@pytest.mark.full
def test_pickles_come_from_files_that_a_user_names_alone() -> None:
    """Never from sockets or caches: CVE-2025-32444, CVE-2025-29783 and many others.

    The one cache of pickled programs, JAX's, belongs to this user alone, as `why_untrusted` says, and has a checksum.
    """
    assert {name for name, tree in sources().items() if imported(tree) & _PICKLING} == {
        "backends/jax/kept_programs.py",
        "formats/pickle_check.py",
        "formats/torch_archive.py",
        "weights/tensor_files.py",
    }
    kept = (SOURCE / "backends/jax/kept_programs.py").read_text()
    assert "why_untrusted(descriptor, group_may_write=False)" in kept
    assert "pickle.load" not in kept


@pytest.mark.full
def test_no_library_unpickles_for_us() -> None:
    """torch.load is called with weights_only; nothing receives objects over a socket or a queue."""
    loads, sends = [], []
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                whole = ast.unparse(node.func)
                if whole in ("torch.load", "np.load", "numpy.load"):
                    loads.append({each.arg: ast.unparse(each.value) for each in node.keywords})
                if node.func.attr in (
                    "recv_pyobj",
                    "send_pyobj",
                    "broadcast_object_list",
                    "gather_object",
                    "all_gather_object",
                ):
                    sends.append(f"{path}: {whole}")
    assert [each.get("weights_only") for each in loads] == ["True"]
    assert sends == []


# --- what the tests above read the source by --------------------------------------------------------------------------


@cache
def sources() -> dict[str, ast.Module]:
    return {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


def imported(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names} | {each.name.split(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            found |= {node.module, node.module.split(".")[0]}
    return found


def called(node: ast.Call) -> str:
    """A function's name; a method's does not count, but for that of importlib."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr if ast.unparse(node.func.value) == "importlib" else ""
    return node.func.id if isinstance(node.func, ast.Name) else ""
