"""Loads mutated tokenizers and encodes with them: each is refused by name or gives ids of its vocabulary, and nothing
dies, hangs or grows.

    make fuzz-tokenizers                                    # 50,000 of them
    make fuzz-tokenizers ARGS="--seed 7 --only 1234"        # one again, with its traceback

    refused     by an error of `ostro.errors`
    same        the ids of the tokenizer before it was changed
    other       other ids, all of them in its vocabulary
"""

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

from checkpoint_fuzzer import Bench, run_command
from checkpoint_mutations import Subject
from tokenizer_mutations import mutated, subjects, whole

from ostro.errors import ModelError
from ostro.text.tokenizer import ChatText, Tokenizer

TEXTS = (
    "",
    "the quick brown fox",
    "z" * 40,
    " \n\t  <s>the</s> [CLS]",
    "éﷺ 🙂 中文 1234",
    "a" * 300 + "!",
    "<|im_end|>" * 5,
)
LONGEST = 2000
"""Ids that the longest of these texts may have: each of its bytes grows by what is ordinary at most."""
MARK = "0123456789abcdef"
# Whoever sets it gets a page for each panic, which takes most of the time.
os.environ["RUST_BACKTRACE"] = "0"


class TokenizerBench(Bench):
    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.seed = root, seed
        self.subjects = subjects()
        self.expected = {each.name: self._whole_ids(each) for each in self.subjects}

    def _mutated(self, subject: Subject, random: Random) -> dict[str, bytes]:
        return dict(mutated(subject, random))

    def _whole_ids(self, subject: Subject) -> list[list[int]]:
        with self._files(whole(subject)) as directory:
            return _all_ids(Tokenizer.load(directory / subject.model))

    def _run(self, subject: Subject, directory: Path, *, looks_closely: bool) -> tuple[str, str]:
        # As a server's models have threads of their own, which take the library's caches along.
        with self.timed(), ThreadPoolExecutor(1) as thread:
            ids = thread.submit(lambda: _all_ids(Tokenizer.load(directory / subject.model))).result()
        return ("same" if ids == self.expected[subject.name] else "other"), ""


def _all_ids(tokenizer: Tokenizer) -> list[list[int]]:
    """The ids of all texts in every way that the server encodes them. One that the tokenizer gives up on has none."""
    found: list[list[int]] = []
    for text in TEXTS:
        ways: Sequence[Callable[[], list[int]]] = (
            partial(tokenizer.encode, text),
            partial(tokenizer.encode, text, allow_special=False),
            partial(tokenizer.encode_start, text, 50),
            partial(_pair_ids, tokenizer, text),
            partial(tokenizer.encode_rendered, ChatText(f"{text}{MARK}{text}", MARK)),
        )
        for encode in ways:
            with suppress(ModelError):
                found.append(encode())
    for ids in found:
        _check(tokenizer, ids)
    tokenizer.bad_word_ids(["the"])
    assert 0 <= tokenizer.num_closing < LONGEST
    return found


def _pair_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_pair(text, "a", 60).ids


def _check(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert len(ids) <= LONGEST * 20, f"{len(ids)} ids"
    assert all(0 <= token < 1 << 32 for token in ids), "ids that fit into the tables' indices"
    text = tokenizer.decode(ids)
    assert len(text) <= 4000 * (len(ids) + 1), "text of the pieces' length"
    assert all(isinstance(tokenizer.token_bytes(token), bytes) for token in (*ids, -1, tokenizer.vocab_size, 1 << 40))


if __name__ == "__main__":
    sys.exit(run_command(__doc__, TokenizerBench))
