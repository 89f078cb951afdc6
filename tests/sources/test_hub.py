"""A small Hub of our own on the loopback. Its client reads its settings on import, so it runs in another process."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import COMMIT, Hub, hub_environment, running_hub, silent_hub
from gguf_factory import write_tiny_gguf
from hrm_brain import write_brain
from warm_start import warm_run

REPO = "acme/tiny-llama"


WEIGHTS = 1 << 20
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "tie_word_embeddings": True,
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def safetensors(name: str) -> bytes:
    entry = {"dtype": "U8", "shape": [WEIGHTS], "data_offsets": [0, WEIGHTS]}
    header = json.dumps({name: entry}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(WEIGHTS)


FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "generation_config.json": b'{"eos_token_id": 7}',
    "tokenizer.json": b"{}",
    "tokenizer.model": b"pieces",
    "chat_template.jinja": b"{{ messages }}",
    "1_Pooling/config.json": b'{"pooling_mode_cls_token": true}',
    "model.safetensors": safetensors("model.norm.weight"),
    "pytorch_model.bin": b"a pickle",
    "modeling_tiny.py": b"raise SystemExit",
    "onnx/model.safetensors": b"something else",
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub({REPO: FILES}) as hub:
        yield hub


PROGRAM = """
import json, sys
from ostro.errors import OstroError
from ostro.weights import open_checkpoint
try:
    checkpoint = open_checkpoint(sys.argv[1], progress=False)
    files = [str(path.relative_to(checkpoint.path)) for path in checkpoint.path.rglob("*") if path.is_file()]
    print(json.dumps([checkpoint.name, sorted(files), checkpoint.generation_config]))
except OstroError as error:
    print(type(error).__name__, error.message)
"""


def open_from(hub: Hub | str, tmp_path: Path, ref: str = REPO, *, program: str = PROGRAM, **environment: str) -> str:
    """What a fresh process says of the model."""
    address = hub if isinstance(hub, str) else hub.address
    # Run where no directory could be taken for the model.
    result = warm_run(
        [ref], program=program, environment=hub_environment(address, tmp_path / "hf") | environment, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_a_hub_model_is_fetched_without_pickles_or_code_and_opens(hub: Hub, tmp_path: Path) -> None:
    name, files, generation_config = json.loads(open_from(hub, tmp_path))
    assert name == REPO
    assert files == sorted(FILES.keys() - {"pytorch_model.bin", "modeling_tiny.py", "onnx/model.safetensors"})
    assert generation_config == {"eos_token_id": 7}
    assert sorted(hub.served) == files


@pytest.mark.full
def test_pickles_of_the_hub_are_fetched_only_where_there_is_nothing_better(tmp_path: Path) -> None:
    pickles = {"pytorch_model-00001-of-00001.bin": b"a pickle", "training_args.bin": b"another"}
    index = json.dumps({"weight_map": {"w": "pytorch_model-00001-of-00001.bin"}}).encode()
    files = {"config.json": FILES["config.json"], "pytorch_model.bin.index.json": index, **pickles}
    with running_hub({REPO: files}) as hub:
        _, found, _ = json.loads(open_from(hub, tmp_path))
        assert found == sorted(files.keys() - {"training_args.bin"})
        assert sorted(hub.served) == found
        assert json.loads(open_from(hub, tmp_path, HF_HUB_OFFLINE="1"))[1] == found
        assert open_from(hub, tmp_path, program=PLAN).endswith(" True")


@pytest.mark.full
def test_a_published_hrm_is_fetched_without_its_code_and_opens(tmp_path: Path) -> None:
    write_brain(tmp_path / "run", dialect="upstream").rename(tmp_path / "run" / "checkpoint")
    published = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    extra = {"hrm_act_v1.py": b"raise SystemExit", "README.md": b"", "step_90": b"an older one"}
    with running_hub({REPO: published | extra}) as hub:
        name, found, _ = json.loads(open_from(hub, tmp_path))
        assert (name, found) == (REPO, sorted(hub.served))
        assert {"all_config.yaml", "checkpoint"} <= set(found) <= published.keys()
        assert json.loads(open_from(hub, tmp_path, HF_HUB_OFFLINE="1"))[1] == found


@pytest.mark.full
def test_a_revision_can_be_named_and_a_cached_model_opens_offline(hub: Hub, tmp_path: Path) -> None:
    online = open_from(hub, tmp_path, f"{REPO}@v1")
    served = len(hub.served)
    assert open_from(hub, tmp_path, f"{REPO}@v1", HF_HUB_OFFLINE="1") == online
    assert len(hub.served) == served


def test_an_unknown_repository_is_not_found(hub: Hub, tmp_path: Path) -> None:
    assert open_from(hub, tmp_path, "acme/none").startswith("ModelNotFound The Hub has no repository acme/none")


def test_an_unknown_revision_is_not_found(hub: Hub, tmp_path: Path) -> None:
    output = open_from(hub, tmp_path, f"{REPO}@v9")
    assert output == f"ModelNotFound The Hub's repository {REPO} has no revision 'v9'."


def test_a_download_that_breaks_off_says_so(hub: Hub, tmp_path: Path) -> None:
    hub.breaks_off = True
    # Its client tries five times, a second apart.
    hasty = PROGRAM.replace("import json, sys", "import json, sys, time; time.sleep = lambda seconds: None")
    output = open_from(hub, tmp_path, program=hasty)
    assert output.startswith(f"DownloadFailed The connection to the Hub broke off while {REPO} was fetched")


def test_a_gated_repository_asks_for_a_token(hub: Hub, tmp_path: Path) -> None:
    hub.refusal = (403, {"X-Error-Code": "GatedRepo"})
    output = open_from(hub, tmp_path)
    assert output.startswith("DownloadFailed The Hub gives acme/tiny-llama only")
    assert "HF_TOKEN" in output


def test_offline_without_a_cached_copy_is_a_failed_download(hub: Hub, tmp_path: Path) -> None:
    output = open_from(hub, tmp_path, HF_HUB_OFFLINE="1")
    assert output.startswith("DownloadFailed The Hub could not be reached for acme/tiny-llama")
    assert "HF_HUB_OFFLINE" in output


def test_a_hub_that_cannot_be_reached_is_a_failed_download(tmp_path: Path) -> None:
    # Nothing listens on the discard port.
    output = open_from("http://127.0.0.1:9", tmp_path)
    assert output.startswith("DownloadFailed The Hub could not be reached")


IMPATIENT = PROGRAM.replace("try:", "from ostro.sources import hub; hub._ANSWER_SECONDS = 0.5\ntry:", 1)


@pytest.mark.full
@pytest.mark.parametrize("ref", [REPO, f"{REPO}@v1"])
def test_a_cached_model_opens_though_the_hub_is_silent(hub: Hub, tmp_path: Path, ref: str) -> None:
    """It waited for an answer for ever."""
    online = open_from(hub, tmp_path, ref)
    with silent_hub() as (address, taken):
        assert open_from(address, tmp_path, ref, program=IMPATIENT) == online
        assert taken


@pytest.mark.full
def test_a_cached_model_opens_though_the_hub_is_out_of_order(hub: Hub, tmp_path: Path) -> None:
    online = open_from(hub, tmp_path)
    hub.refusal = (503, {})
    assert open_from(hub, tmp_path) == online


@pytest.mark.full
def test_the_hub_is_not_asked_for_a_commit_that_is_cached(hub: Hub, tmp_path: Path) -> None:
    ref = f"{REPO}@{COMMIT}"
    online = open_from(hub, tmp_path, ref)
    with silent_hub() as (address, taken):
        assert open_from(address, tmp_path, ref) == online
        assert not taken


@pytest.mark.full
def test_a_commit_of_which_weights_are_missing_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    ref = f"{REPO}@{COMMIT}"
    online = open_from(hub, tmp_path, ref)
    [weights] = (tmp_path / "hf").rglob("snapshots/*/model.safetensors")
    weights.unlink()
    assert open_from(hub, tmp_path, ref) == online


FIND = """
import sys
from ostro.sources.references import parse_model
print(parse_model(sys.argv[1]).find(newest=False))
"""


@pytest.mark.full
def test_a_snapshot_that_lacks_a_shard_is_not_found(tmp_path: Path) -> None:
    """A download that broke off was found all the same, and only told apart once it was opened."""
    shards = {f"model-0000{number}-of-00002.safetensors": safetensors(f"w{number}") for number in (1, 2)}
    index = json.dumps({"weight_map": {f"w{number}": name for number, name in enumerate(shards, 1)}}).encode()
    files = {"config.json": FILES["config.json"], "model.safetensors.index.json": index, **shards}
    with running_hub({REPO: files}) as hub:
        assert open_from(hub, tmp_path, program=FIND) == "None"
        open_from(hub, tmp_path)
        snapshot = Path(open_from(hub, tmp_path, program=FIND))
        assert {path.name for path in snapshot.iterdir()} == files.keys()
        (snapshot / "model-00002-of-00002.safetensors").unlink()
        assert open_from(hub, tmp_path, program=FIND) == "None"


def test_a_silent_hub_and_no_copy_is_a_failed_download(tmp_path: Path) -> None:
    with silent_hub() as (address, _):
        output = open_from(address, tmp_path, program=IMPATIENT)
    assert output.startswith("DownloadFailed The Hub could not be reached")


PLAN = """
import sys
from ostro.config import EngineConfig
from ostro.backends.planning import plan
found = plan(sys.argv[1], EngineConfig(device="cpu"), memory=1 << 33)
print(found.model, found.parameters, found.fits)
"""


@pytest.mark.full
def test_a_hub_model_is_planned_by_its_headers(hub: Hub, tmp_path: Path) -> None:
    assert open_from(hub, tmp_path, program=PLAN) == f"{REPO} {WEIGHTS} True"
    assert set(hub.served) == {"config.json", "model.safetensors"}
    assert hub.num_bytes < WEIGHTS / 10
    open_from(hub, tmp_path)
    # What is here needs no Hub.
    with silent_hub() as (address, taken):
        assert open_from(address, tmp_path, program=PLAN) == f"{REPO} {WEIGHTS} True"
        assert not taken


def test_a_full_disk_is_named_with_its_cure(hub: Hub, tmp_path: Path) -> None:
    limited = PROGRAM.replace("import json, sys", "import json, resource, sys; resource.setrlimit(1, (40, 40))")
    output = open_from(hub, tmp_path, program=limited)
    assert output.startswith(f"DiskFull No room for {REPO} in")
    assert "HF_HOME" in output


# --- GGUF on the Hub ------------------------------------------------------------------------------------------------

GGUF_REPO = "acme/tiny-GGUF"
GGUF_PROGRAM = """
import sys
from ostro.errors import OstroError
from ostro.weights import open_checkpoint
try:
    checkpoint = open_checkpoint(sys.argv[1], progress=False)
    print(checkpoint.name, checkpoint.path.name, checkpoint.config["hidden_size"])
except OstroError as error:
    print(type(error).__name__, error.message)
"""


@pytest.fixture(scope="module")
def ggufs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """One model at three precisions, as most such repositories have it, and one in files of its own."""
    data = write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()
    names = ("tiny-q4_k_m.gguf", "tiny-q8_0.gguf", "F16/tiny-f16.gguf")
    many = {"README.md": b"words", "config.json": b"{}"} | dict.fromkeys(names, data)
    with running_hub(
        {GGUF_REPO: many, "acme/one-GGUF": {"one.gguf": data}, "acme/odd": {"a.gguf": data, "b.gguf": data}}
    ) as hub:
        yield hub


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("reference", "opened"),
    [
        (f"{GGUF_REPO}:tiny-q8_0.gguf", "tiny-q8_0.gguf"),
        (f"{GGUF_REPO}@v1:Q8_0", "tiny-q8_0.gguf"),
        (f"{GGUF_REPO}:f16", "tiny-f16.gguf"),
        (GGUF_REPO, "tiny-q4_k_m.gguf"),
        ("acme/one-GGUF", "one.gguf"),
    ],
)
def test_one_gguf_file_of_a_repository_is_fetched(ggufs: Hub, tmp_path: Path, reference: str, opened: str) -> None:
    ggufs.served.clear()
    online = open_from(ggufs, tmp_path, reference, program=GGUF_PROGRAM)
    assert online == f"{reference.partition('@')[0].partition(':')[0]} {opened} 8"
    assert [name.rpartition("/")[2] for name in ggufs.served] == [opened]
    assert open_from(ggufs, tmp_path, reference, program=GGUF_PROGRAM, HF_HUB_OFFLINE="1") == online


@pytest.mark.full
@pytest.mark.parametrize("reference", ["acme/odd", f"{GGUF_REPO}:Q5_0", f"{GGUF_REPO}:none.gguf"])
def test_an_ambiguous_gguf_reference_lists_the_choices(ggufs: Hub, tmp_path: Path, reference: str) -> None:
    repo = reference.partition(":")[0]
    output = open_from(ggufs, tmp_path, reference, program=GGUF_PROGRAM)
    assert output.startswith(f"ModelNotFound {repo} holds these GGUF files: ")
    assert output.endswith(f"Name one: {repo}:FILE.gguf.")


def test_a_gguf_file_on_the_hub_is_planned_by_its_header(ggufs: Hub, tmp_path: Path) -> None:
    output = open_from(ggufs, tmp_path, f"{GGUF_REPO}:F16", program=PLAN)
    assert output.startswith(f"{GGUF_REPO} ")
    assert output.endswith(" True")
