"""ostro score: the likelihood of given continuations of prompts; scores a file of pairs together."""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from pydantic_core import from_json

from ostro.cli.files import read_lines, written_whole
from ostro.cli.in_process import tell_progress
from ostro.cli.options import add_engine_options, engine_config
from ostro.cli.parser import describe
from ostro.errors import BadRequest
from ostro.llm import LLM

_Pair = dict[str, str | list[int]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input",
        type=Path,
        required=True,
        metavar="FILE",
        help="prompt and continuation pairs, one per line; - reads standard input",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the scores here instead of to stdout")
    parser.add_argument(
        "--one-pass",
        action="store_true",
        help="for an HRM: score each continuation in a single pass; the result is not a likelihood",
    )
    parser.add_argument(
        "--truncate-prompt-tokens",
        type=int,
        metavar="N",
        help="keep only this many tokens at the end of a prompt; -1 keeps what fits",
    )
    describe(
        parser,
        {"ostro score --input pairs.jsonl --output scores.jsonl": "score a file"},
        "Each input line is {prompt, continuation}: two texts, or two lists of token ids. Each output line is "
        "{logprob, is_greedy, num_tokens}, plus any other fields of the input line, such as an id.",
    )
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    pairs = _pairs(args.input)
    # Opened first: an unwritable path should be reported before the work, not after it.
    with nullcontext(sys.stdout) if args.output is None else written_whole(args.output) as file:
        tell_progress()
        llm = LLM(config=engine_config(args))
        _check_each(llm, pairs, one_pass=args.one_pass, truncate_prompt_tokens=args.truncate_prompt_tokens)
        scores = llm.score(
            [pair["prompt"] for pair in pairs],
            [pair["continuation"] for pair in pairs],
            one_pass=args.one_pass,
            truncate_prompt_tokens=args.truncate_prompt_tokens,
            progress=sys.stderr.isatty(),
        )
        for pair, score in zip(pairs, scores, strict=True):
            others = {name: value for name, value in pair.items() if name not in ("prompt", "continuation")}
            told = {"logprob": score.logprob, "is_greedy": score.is_greedy, "num_tokens": score.num_tokens}
            file.write(json.dumps(others | told, ensure_ascii=False) + "\n")
    return 0


def _check_each(llm: LLM, pairs: Sequence[_Pair], *, one_pass: bool, truncate_prompt_tokens: int | None) -> None:
    """Refuses a file with an invalid pair before anything is scored, and says which."""
    for number, pair in enumerate(pairs, 1):
        try:
            llm.prepare_scoring(
                pair["prompt"],
                pair["continuation"],
                one_pass=one_pass,
                truncate_prompt_tokens=truncate_prompt_tokens,
            )
        except BadRequest as error:
            raise BadRequest(f"Pair {number}: {error}", param=error.param) from error


def _pairs(path: Path) -> list[_Pair]:
    pairs = [_pair(number, text) for number, text in read_lines(path)]
    if not pairs:
        raise BadRequest(f"{path} holds no pairs. Write one per line.")
    return pairs


def _pair(number: int, text: str) -> _Pair:
    try:
        pair = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"Line {number} is not valid JSON: {error}.") from error
    texts = isinstance(pair, dict) and [pair.get("prompt"), pair.get("continuation")]
    if not texts or not (all(isinstance(each, str) for each in texts) or all(map(_is_ids, texts))):
        raise BadRequest(f"Line {number} must hold a prompt and a continuation, two texts or two lists of token ids.")
    assert isinstance(pair, dict)
    return pair


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in value)
