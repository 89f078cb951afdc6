"""Models that need settings of their own, as sides in this process."""

from dataclasses import replace
from pathlib import Path

from hrm_brain import write_brain
from levanter_directory import TINY_LLAMA, levanter_arrays, write_checkpoint, write_yaml
from model_directory import write_model
from safetensors.torch import load_file

from ostro.config import EngineConfig
from ostro.formats.json_file import read_json_object
from ostro.llm import LLM
from ostro.measure.compare.answers import Answer
from ostro.measure.compare.sides import SideOptions, side_of
from ostro.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
PROMPTS = ["the fox", "the lazy dog"]


def answers(reference: str) -> tuple[str, list[str]]:
    """The model's name before it is loaded, and its texts."""
    side = side_of(reference, SideOptions())
    side.check(PROMPTS, GREEDY)
    side.prepare()
    side.open()
    found = dict(side.answers(PROMPTS, GREEDY, concurrency=2))
    side.close()
    texts = []
    for index in range(len(PROMPTS)):
        outcome = found[index]
        assert isinstance(outcome, Answer), outcome
        texts.append(outcome.text)
    return side.model, texts


def test_a_levanter_checkpoint_gives_the_texts_of_its_export(tmp_path: Path) -> None:
    export = write_model(tmp_path / "export")
    config = read_json_object(export / "config.json")
    arrays = levanter_arrays(load_file(export / "model.safetensors"), config)
    checkpoint = write_checkpoint(tmp_path / "llama" / "step-1000", arrays)
    settings = write_yaml(tmp_path / "llama.yaml", TINY_LLAMA)
    _, expected = answers(f"offline:{export}?threads=1")
    name, texts = answers(f"offline:{checkpoint}?model_config={settings}&tokenizer={export}&threads=1")
    assert name == "llama-step-1000"
    assert texts == expected
    assert all(texts)


def test_an_hrm_computes_as_its_settings_say(tmp_path: Path) -> None:
    brain, tokenizer = write_brain(tmp_path / "brain", vocab=700), write_model(tmp_path / "tokenizer")
    plain = EngineConfig(tokenizer=str(tokenizer), threads=1)
    three = replace(plain, hrm_steps=3)
    configs = {
        "hrm_steps=1": replace(plain, hrm_steps=1),
        "hrm_steps=3&hrm_halting=false": three,
        "hrm_steps=3&hrm_halting=true": replace(three, hrm_halting=True),
        "hrm_steps=3&hrm_dialect=upstream": replace(three, hrm_dialect="upstream"),
    }
    found = []
    for settings, config in configs.items():
        _, texts = answers(f"offline:{brain}?tokenizer={tokenizer}&threads=1&{settings}")
        assert texts == [each.text for each in LLM(brain, config).generate(PROMPTS, GREEDY)]
        found.append(texts[0])
    assert len(set(found)) == len(configs)
