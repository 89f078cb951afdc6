"""JSONSchemaBench's schemas with MaskBench's instances: what compiles, what is accepted, and how long masks take.

    git clone https://github.com/guidance-ai/jsonschemabench
    python bench/structured.py jsonschemabench/maskbench/data            # the default model's vocabulary
    python bench/structured.py …/data --model qwen2.5-coder-0.5b         # another model's
    python bench/structured.py …/data --ranks …/llama3/tokenizer.model   # Llama 3's 128k, from PyPI's llama-models
    python bench/structured.py …/data --schemas 500 --generate 100       # a sample; and the default model writes

No model is needed but for `--generate`: each instance's tokens are followed under the masks, as if a model had written
them. Times are of CPU time of the thread, in µs; a schema's compile time has that of its first mask in it. An instance
is right if a valid one is accepted and an invalid one is not. Strict is what a request gets that says so; lenient is
`strict: false`.
"""

import argparse
import json
import platform
import random
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ostro.engine.constraint import Constraint
from ostro.errors import BadRequest, SequenceFailed
from ostro.grammar.check import check_structured
from ostro.grammar.compiler import GrammarCompiler
from ostro.grammar.vocabulary import TokenizerLike
from ostro.structured import StructuredOutput
from ostro.text.pretokenizers import pre_tokenizer_named
from ostro.text.tokenizer import Tokenizer
from ostro.weights import open_checkpoint

RESULTS = Path(__file__).parent / "results"

# Llama 3's, of which the file with the ranks says nothing.
LLAMA3_ENDS, LLAMA3_SPECIAL = (128_001, 128_009), range(128_000, 128_256)

# Published with MaskBench, of all its schemas (EPYC; llguidance 0.7.10, XGrammar 0.1.17, llama.cpp, Outlines).
PUBLISHED = """\
published             mask p50     p99   compile p50       p99   schemas right   with a bad instance accepted
llguidance                  46     533        1.0 ms     18 ms      8909/11306                              0
XGrammar                     9    5687        0.92 s   timeout      8122/11306                           1368
llama.cpp                17021   60371        0.3 ms     29 ms      6505/11306                            649
Outlines                    34    7184        0.59 s     413 s      7050/11306                            822"""

T = TypeVar("T")


@dataclass
class Tally:
    """Counts for one split and one mode."""

    schemas: int = 0
    compiled: int = 0
    right: int = 0
    """Schemas that compiled and whose instances are all right."""
    invalid: int = 0
    invalid_accepted: int = 0
    valid: int = 0
    valid_refused: int = 0
    failed: int = 0
    """Instances on which the matcher hit a limit."""
    compile_us: list[float] = field(default_factory=list)
    mask_us: list[float] = field(default_factory=list)
    refusals: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, other: "Tally") -> None:
        for name in ("schemas", "compiled", "right", "invalid", "invalid_accepted", "valid", "valid_refused", "failed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.compile_us += other.compile_us
        self.mask_us += other.mask_us
        for why, count in other.refusals.items():
            self.refusals[why] += count

    def row(self) -> dict[str, object]:
        return {
            "schemas": self.schemas,
            "compiled": share(self.compiled, self.schemas),
            "right": share(self.right, self.schemas),
            "invalid accepted": f"{self.invalid_accepted}/{self.invalid}",
            "valid refused": f"{self.valid_refused}/{self.valid}",
            "failed": self.failed,
            **{f"compile {name}": percentile(self.compile_us, part) for name, part in PARTS.items()},
            **{f"mask {name}": percentile(self.mask_us, part) for name, part in PARTS.items()},
        }


PARTS = {"p50": 0.5, "p99": 0.99}


class Ranks:
    """A vocabulary from a file of tiktoken's ranks, with Llama 3's special tokens."""

    def __init__(self, path: Path) -> None:
        import tiktoken
        from tiktoken.load import load_tiktoken_bpe

        ranks = load_tiktoken_bpe(str(path))
        [pattern] = pre_tokenizer_named("llama-bpe").patterns
        self._encoding = tiktoken.Encoding("llama3", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        self._tokens = {rank: data for data, rank in ranks.items()}
        self._tokens |= {token: f"<|special_{token}|>".encode() for token in LLAMA3_SPECIAL}
        self.vocab_size = len(self._tokens)
        self.eos_ids, self.special_ids = frozenset(LLAMA3_ENDS), frozenset(LLAMA3_SPECIAL)

    def token_bytes(self, id: int) -> bytes:
        return self._tokens.get(id, b"")

    def encode(self, text: str, *, add_special: bool = True, allow_special: bool = True) -> list[int]:
        return self._encoding.encode_ordinary(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="MaskBench's directory of JSON files")
    parser.add_argument("--schemas", type=int, metavar="N", help="a random sample instead of all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="whose vocabulary to use, in place of the default model's")
    parser.add_argument("--ranks", type=Path, metavar="FILE", help="Llama 3's vocabulary, in tiktoken's form")
    parser.add_argument("--generate", type=int, default=0, metavar="N", help="let the default model write N answers")
    parser.add_argument("--save", type=Path, help=f"such as {RESULTS.name}/structured.json")
    args = parser.parse_args()

    files = sorted(args.data.glob("*.json"))
    if not files:
        sys.exit(f"There are no JSON files in {args.data}.")
    if args.schemas is not None:
        files = sorted(random.Random(args.seed).sample(files, min(args.schemas, len(files))))
    name, tokenizer = vocabulary_of(args)
    compiler = GrammarCompiler(lambda: tokenizer, tokenizer.vocab_size)
    print(f"{len(files)} schemas, {name}: {tokenizer.vocab_size} tokens")
    tallies = {strict: run(files, tokenizer, compiler, strict=strict) for strict in (True, False)}
    record: dict[str, Any] = {"vocabulary": name, "schemas": len(files), "seed": args.seed, "cpu": platform.machine()}
    for strict, splits in tallies.items():
        mode = "strict" if strict else "lenient"
        record[mode] = report(mode, splits)
    print(PUBLISHED)
    if args.generate:
        record["generated"] = generated(files, args.generate, args.seed)
    if args.save is not None:
        args.save.write_text(json.dumps(record, indent=1) + "\n")


def vocabulary_of(args: argparse.Namespace) -> tuple[str, TokenizerLike]:
    if args.ranks is not None:
        return "Llama 3", Ranks(args.ranks)
    checkpoint = open_checkpoint(args.model)
    return checkpoint.name, Tokenizer.load(checkpoint.tokenizer_path)


def run(
    files: Sequence[Path], tokenizer: TokenizerLike, compiler: GrammarCompiler, *, strict: bool
) -> dict[str, Tally]:
    splits: dict[str, Tally] = defaultdict(Tally)
    for number, path in enumerate(files):
        if sys.stderr.isatty():
            print(f"\r{'strict' if strict else 'lenient'} {number}/{len(files)}", end="", file=sys.stderr)
        one(json.loads(path.read_text()), splits[split_of(path)], tokenizer, compiler, strict=strict)
    return dict(splits)


def split_of(path: Path) -> str:
    return re.split(r"---|_\d|_(?:java|javascript|live|multiple|parallel|simple|exec|rest|sql)", path.stem)[0]


def one(
    case: dict[str, Any], tally: Tally, tokenizer: TokenizerLike, compiler: GrammarCompiler, *, strict: bool
) -> None:
    """One schema and its instances."""
    tally.schemas += 1
    inner = compiler.vocabulary.tokenizer
    try:
        structured = StructuredOutput.from_schema(case["schema"], strict=strict)
        constraint, spent = timed(lambda: check_structured(structured, {}, inner))
    except BadRequest as error:
        tally.refusals[kind_of(error.message)] += 1
        return
    tally.compiled += 1
    tally.compile_us.append(spent)
    all_right = True
    for test in case.get("tests", ()):
        text = json.dumps(test["data"], ensure_ascii=False)
        try:
            accepted = follows(constraint, text, tokenizer, compiler, tally.mask_us)
        except SequenceFailed:
            tally.failed += 1
            accepted = False
        if test["valid"]:
            tally.valid += 1
            tally.valid_refused += not accepted
        else:
            tally.invalid += 1
            tally.invalid_accepted += accepted
        all_right &= accepted == test["valid"]
    tally.right += all_right


def follows(
    constraint: Constraint, text: str, tokenizer: TokenizerLike, compiler: GrammarCompiler, mask_us: list[float]
) -> bool:
    matcher = compiler.prepare(constraint).start()
    for token in (*tokenizer.encode(text, add_special=False, allow_special=False), None):
        if matcher.is_done:
            return token is None
        words, spent = timed(matcher.mask)
        mask_us.append(spent)
        assert words is not None
        if token is None:
            return any(words[end // 32] >> end % 32 & 1 for end in tokenizer.eos_ids)
        if not words[token // 32] >> token % 32 & 1:
            return False
        matcher.take(token)
    return False


def timed(call: Callable[[], T]) -> tuple[T, float]:
    start = time.thread_time_ns()
    result = call()
    return result, (time.thread_time_ns() - start) / 1000


def kind_of(message: str) -> str:
    """Refusals are counted by keyword."""
    match = re.search(r"(?:exactly|enforced): (\S+) at #.*?\((.*?)\)|compiled: (.*)", message)
    return (match[1] or match[3]) if match else message[:80]


def report(mode: str, splits: dict[str, Tally]) -> dict[str, Any]:
    whole = Tally()
    for tally in splits.values():
        whole.add(tally)
    rows = {name: splits[name].row() for name in sorted(splits)} | {"all": whole.row()}
    columns = list(rows["all"])
    print(f"\n{mode:<18}" + "".join(f"{column:>18}" for column in columns))
    for name, row in rows.items():
        print(f"{name:<18}" + "".join(f"{row[column]!s:>18}" for column in columns))
    refusals = dict(sorted(whole.refusals.items(), key=lambda item: -item[1])[:12])
    print("refused: " + ", ".join(f"{why} {count}" for why, count in refusals.items()) + "\n")
    return {"splits": rows, "refused": refusals}


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def percentile(values: list[float], part: float) -> float | None:
    return round(sorted(values)[min(int(part * len(values)), len(values) - 1)], 1) if values else None


def generated(files: Sequence[Path], count: int, seed: int) -> dict[str, int]:
    """How many of the default model's answers validate, of those that are complete. One that is cut off by the limit
    on tokens, as a small model's often are, is no answer.
    """
    import jsonschema

    from ostro import LLM, SamplingParams

    llm, tally = LLM(), {"asked": 0, "refused": 0, "failed": 0, "cut": 0, "complete": 0, "valid": 0}
    schemas, prompts, params = [], [], []
    for path in random.Random(seed).sample(list(files), min(count, len(files))):
        schema = json.loads(path.read_text())["schema"]
        tally["asked"] += 1
        try:
            structured = StructuredOutput.from_schema(schema, jump_forward=True)
            asked = SamplingParams(max_tokens=200, temperature=0.7, seed=seed, structured=structured)
            llm.prepare(PROMPT, asked)
        except BadRequest:
            tally["refused"] += 1
            continue
        schemas.append(schema)
        prompts.append(PROMPT + json.dumps(schema)[:300] + "\n\n")
        params.append(asked)
    for schema, completion in zip(schemas, llm.generate(prompts, params, progress=True), strict=True):
        [choice] = completion.choices
        if choice.finish_reason != "stop":
            tally["cut" if choice.finish_reason == "length" else "failed"] += 1
            continue
        tally["complete"] += 1
        validator = jsonschema.validators.validator_for(schema)(schema, format_checker=jsonschema.FormatChecker())
        tally["valid"] += validator.is_valid(json.loads(choice.text))
    print(f"generated by {llm.name}: {tally}")
    return tally


PROMPT = "An example of JSON for this schema:\n"


if __name__ == "__main__":
    main()
