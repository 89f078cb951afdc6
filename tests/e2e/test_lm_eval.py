"""lm_eval against `ostro serve`, and in process: what it measures is what the engine says."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from live_server import LiveServer, live_server
from model_directory import CONTEXT, write_model

from ostro import LLM, SamplingParams

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs the extra `eval`: `make test-eval`"),
]

KEY = "sk-evaluation"
NUM_GENERATED = 12
# The first is in some of the model's texts.
STOPS = ["mp", "\n\n"]
QUESTIONS: list[dict[str, object]] = [
    {"question": "the quick brown fox jumps over", "choices": ["the lazy dog", "the quick fox", "no"], "answer": 0},
    {"question": "the dog does not", "choices": ["mind", "jump over the brown system"], "answer": 0},
    # Characters of several bytes, whose tokens are parts of them, and white space at the border.
    {"question": "assistant: caf\u00e9 \u4f60 ", "choices": ["yes", "\u597d", "\U0001f98a"], "answer": 1},
]
PROMPTS = ["the dog", "does not", "the quick", "yes, no, ", "caf\u00e9 \u4f60\u597d"]
# The model's own words follow these, and are text that gives the same tokens again.
CLEAR_PROMPTS = PROMPTS[:3]

# How lm_eval may reach the server: its tokens from the server or from the model's directory, one request at a time,
# several prompts in a request, several requests at a time, text for tokens.
WAYS = {
    "remote tokenizer": (1, "tokenizer_backend=remote"),
    "tokenizer found by itself": (3, "tokenizer_backend=auto"),
    "local tokenizer": (2, "tokenizer_backend=huggingface,tokenizer={directory},num_concurrent=3"),
    "text requests": (1, "tokenizer_backend=huggingface,tokenizer={directory},tokenized_requests=False"),
}
"""The prompts in a request, and model_args."""
IN_PROCESS = "in process"
# As a user's own script would have it: the model's directory, the tasks' folder, where the samples go.
SCRIPT = """
import sys
import lm_eval
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager
from ostro import LLM
from ostro.evaluation import Evaluated

model, tasks, out, *names = sys.argv[1:]
manager, tracker = TaskManager(include_path=tasks), EvaluationTracker(output_path=out)
results = lm_eval.simple_evaluate(Evaluated(LLM(model)), tasks=names, task_manager=manager, log_samples=True)
tracker.general_config_tracker.model_name_sanitized, tracker.date_id = "tiny", "today"
for name in names:
    tracker.save_results_samples(name, results["samples"][name])
"""


@dataclass(frozen=True)
class Exchange:
    """What lm_eval asked for: a context and a continuation, a context and settings, or a text; and what it got."""

    asked: tuple[str, ...]
    got: tuple[str, ...]


Samples = dict[str, list[Exchange]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("evaluated") / "tiny")


@pytest.fixture(scope="module")
def llm(directory: Path) -> LLM:
    return LLM(directory)


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[LiveServer]:
    with live_server(directory.parent, str(directory), faults="", env={"OSTRO_API_KEY": KEY}) as live:
        yield live


@pytest.fixture(scope="module")
def tasks(directory: Path, llm: LLM) -> Path:
    """A folder of tasks and of their data."""
    folder = directory.parent / "tasks"
    folder.mkdir()
    likely: list[dict[str, object]] = [
        {"prompt": prompt, "continuation": continuation}
        for prompt in CLEAR_PROMPTS
        for continuation in (_own_words(llm, prompt), " the lazy dog")
    ]
    prompts: list[dict[str, object]] = [{"prompt": prompt} for prompt in PROMPTS]
    _write_task(
        folder, "local_choice", QUESTIONS, output_type="multiple_choice", doc_to_text="{{question}}",
        doc_to_choice="{{choices}}", doc_to_target="answer", metric="acc",
    )  # fmt: skip
    _write_task(
        folder, "local_likely", likely, output_type="loglikelihood", doc_to_text="{{prompt}}",
        doc_to_target="{{continuation}}", metric="acc", target_delimiter="",
    )  # fmt: skip
    _write_task(
        folder, "local_rolling", prompts, output_type="loglikelihood_rolling", doc_to_text="",
        doc_to_target="{{prompt}}", metric="word_perplexity",
    )  # fmt: skip
    _write_task(
        folder, "local_words", prompts, output_type="generate_until", doc_to_text="{{prompt}}", doc_to_target="fox",
        metric="exact_match", generation_kwargs={"until": STOPS, "max_gen_toks": NUM_GENERATED, "do_sample": False},
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module", params=[*WAYS, IN_PROCESS], ids=lambda way: way.replace(" ", "-"))
def samples(
    request: pytest.FixtureRequest,
    server: LiveServer,
    directory: Path,
    tasks: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Samples:
    """Every question that lm_eval put and the answer it understood, by task."""
    out = tmp_path_factory.mktemp("results")
    names = sorted(path.stem for path in tasks.glob("*.yaml"))
    if request.param == IN_PROCESS:
        command = [sys.executable, "-c", SCRIPT, str(directory), str(tasks), str(out), *names]
    else:
        batch_size, way = WAYS[request.param]
        model_args = f"base_url={server.url}/v1/completions,model=tiny,max_length={CONTEXT},auth_token={KEY},"
        command = [
            sys.executable, "-m", "lm_eval", "--model", "local-completions",
            "--model_args", model_args + way.format(directory=directory), "--batch_size", str(batch_size),
            "--tasks", ",".join(names), "--include_path", str(tasks), "--log_samples", "--output_path", str(out),
        ]  # fmt: skip
    ran = subprocess.run(
        command, env=_offline(out), cwd=out, capture_output=True, text=True, check=False, timeout=240
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return {name: _exchanges(out, name) for name in names}


def test_choices_are_scored_as_the_engine_scores_them(samples: Samples, llm: LLM) -> None:
    assert len(samples["local_choice"]) == 8
    for exchange in samples["local_choice"]:
        assert _measured(exchange) == _engine_s(exchange, llm)


def test_greedy_continuations_are_distinguished_from_others(samples: Samples, llm: LLM) -> None:
    for exchange in samples["local_likely"]:
        assert _measured(exchange) == _engine_s(exchange, llm)
    assert [exchange.got[1] for exchange in samples["local_likely"]] == ["True", "False"] * len(CLEAR_PROMPTS)


def test_rolling_likelihood_is_that_of_the_text_after_the_end_token(samples: Samples, llm: LLM) -> None:
    assert [exchange.asked for exchange in samples["local_rolling"]] == [(prompt,) for prompt in PROMPTS]
    [end] = llm.tokenizer.eos_ids
    for exchange in samples["local_rolling"]:
        [score] = llm.score([[end]], [llm.tokenizer.encode(exchange.asked[0])])
        assert float(exchange.got[0]) == pytest.approx(score.logprob, abs=1e-4)


def test_generated_text_is_the_engine_s_greedy_text(samples: Samples, llm: LLM) -> None:
    completions = llm.generate(PROMPTS, _greedily(stop=STOPS))
    assert [exchange.got[0] for exchange in samples["local_words"]] == [each.text for each in completions]
    assert {each.choices[0].finish_reason for each in completions} == {"stop", "length"}


def _measured(exchange: Exchange) -> tuple[object, bool]:
    logprob, is_greedy = exchange.got
    return pytest.approx(float(logprob), abs=1e-4), is_greedy == "True"


def _engine_s(exchange: Exchange, llm: LLM) -> tuple[float, bool]:
    context, continuation = exchange.asked
    [score] = llm.score([context], [continuation])
    return score.logprob, score.is_greedy


def _own_words(llm: LLM, prompt: str) -> str:
    """As much of the greedy text as gives the same tokens when it is read again."""
    before, [completion] = llm.tokenizer.encode(prompt), llm.generate([prompt], _greedily())
    ids = completion.choices[0].token_ids
    texts = {count: llm.tokenizer.decode(ids[:count]) for count in range(len(ids), 0, -1)}
    return next(
        text for count, text in texts.items() if llm.tokenizer.encode(prompt + text) == before + ids[:count]
    )  # fmt: skip


def _greedily(stop: list[str] | None = None) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_GENERATED, temperature=0, stop=tuple(stop or ()))


def _write_task(folder: Path, name: str, documents: list[dict[str, object]], *, metric: str, **fields: object) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "metric_list": [{"metric": metric}],
        **fields,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))


def _offline(home: Path) -> dict[str, str]:
    """The environment of a machine without a network and with nothing cached."""
    return {
        **os.environ,
        "HF_HOME": str(home / "hub"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "OPENAI_API_KEY": KEY,
        "OMP_NUM_THREADS": "1",
    }


def _exchanges(out: Path, task: str) -> list[Exchange]:
    [path] = out.rglob(f"samples_{task}_*.jsonl")
    documents = sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda each: each["doc_id"])
    return [
        Exchange(tuple(str(part) for part in asked.values()), tuple(str(part) for part in _row(got[0])))
        for document in documents
        for asked, got in zip(document["arguments"].values(), document["resps"], strict=True)
    ]


def _row(answer: str | list[str]) -> list[str]:
    return answer if isinstance(answer, list) else [answer]
