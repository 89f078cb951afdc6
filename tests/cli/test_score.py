import json
import math
from pathlib import Path

import pytest
from model_directory import write_model

from ostro.cli import main
from ostro.llm import LLM


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def score(model: Path, lines: str, directory: Path, *args: str) -> int:
    (directory / "pairs.jsonl").write_text(lines)
    return main(["score", "--model", str(model), "--input", str(directory / "pairs.jsonl"), *args])


def test_a_file_of_pairs_becomes_scores_in_order(model: Path, tmp_path: Path) -> None:
    pairs = [("the fox", " jumps"), ("the lazy", " dog does"), ("the fox", " mind")]
    lines = [{"prompt": prompt, "continuation": rest, "id": at} for at, (prompt, rest) in enumerate(pairs)]
    output = tmp_path / "out.jsonl"
    assert score(model, "\n".join(map(json.dumps, lines)), tmp_path, "--output", str(output)) == 0
    scored = [json.loads(line) for line in output.read_text().splitlines()]
    expected = LLM(model).score([prompt for prompt, _ in pairs], [rest for _, rest in pairs])
    assert [line["id"] for line in scored] == [0, 1, 2]
    for line, own in zip(scored, expected, strict=True):
        assert math.isclose(line["logprob"], own.logprob, abs_tol=1e-5)
        assert (line["is_greedy"], line["num_tokens"]) == (own.is_greedy, own.num_tokens)


def test_pairs_may_be_token_ids(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert score(model, '{"prompt": [5, 6], "continuation": [7, 8, 9]}\n', tmp_path) == 0
    assert json.loads(capsys.readouterr().out)["num_tokens"] == 3


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ("", "holds no pairs"),
        ("{", "Line 1 is not valid JSON"),
        ('\n{"prompt": "a"}', "Line 2 must hold a prompt and a continuation"),
        ('{"prompt": "a", "continuation": [1]}', "Line 1 must hold"),
        ('{"prompt": "a", "continuation": "b"}\n{"prompt": "a", "continuation": ""}', "Pair 2: A continuation must"),
        ('{"prompt": [1], "continuation": [100000]}', "Pair 1: prompt holds token id 100000"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_anything_is(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: str, complaint: str
) -> None:
    assert score(model, lines, tmp_path) == 2
    assert complaint in capsys.readouterr().err
