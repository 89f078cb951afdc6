"""Loads mutated encoders and embeds with them: each is refused by name or gives finite numbers, and nothing dies.

PYTHONPATH=tests/support python tests/hostile/encoder_fuzzer.py --count 2000 --seed 7
"""

import math
import sys
import tempfile
from pathlib import Path

import torch
from checkpoint_fuzzer import PROMPT, Bench, plan_for_gpu, run_command
from checkpoint_mutations import Subject
from encoder_directory import CASES, WIDE, add_modules, reference, write_encoder
from family_case import Config

from ostro.backends.loading import load_runner
from ostro.config import EngineConfig
from ostro.engine.core import EngineCore
from ostro.engine.request import Request, Task
from ostro.errors import OstroError
from ostro.sampling_params import SamplingParams
from ostro.weights import open_checkpoint
from ostro.weights.relevance import read_ranking


class EncoderBench(Bench):
    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.seed = root, seed
        with tempfile.TemporaryDirectory() as scratch:
            # Narrow heads run on torch, wide ones natively.
            self.subjects = [
                _subject(Path(scratch) / f"{kind}{name}{labels}", values, labels)
                for kind, cases in (("narrow-", CASES), ("wide-", WIDE))
                for name, values in cases.items()
                for labels in (0, 1)
            ]

    def _run(self, subject: Subject, directory: Path, *, looks_closely: bool) -> tuple[str, str]:
        with self.timed():
            return self._embeds(subject, directory), ""

    def _embeds(self, subject: Subject, directory: Path) -> str:
        """Which backend ran it."""
        plan_for_gpu(subject, directory)
        checkpoint = open_checkpoint(directory / subject.model)
        read_ranking(checkpoint.config)
        config = EngineConfig(device="cpu", max_batch_tokens=32, max_batch_seqs=2, threads=1)
        runner = load_runner(checkpoint, config)
        core = EngineCore(runner)
        request = Request(
            id=0, prompt_ids=PROMPT, params=SamplingParams(max_tokens=0), seed=0, task=Task.EMBED, second_at=4
        )
        core.add(request)
        while core.has_work:
            for gain in core.step():
                if gain.error is not None:
                    raise OstroError(gain.error)
                assert gain.pooled, "a vector"
                assert all(map(math.isfinite, gain.pooled)), "of numbers"
        return runner.spec.backend.split()[0]


def _subject(directory: Path, values: Config, labels: int) -> Subject:
    model = reference(values, labels=labels)
    write_encoder(directory, model)
    if not labels:
        dense = (torch.ones(8, model.config.hidden_size), torch.ones(8))
        add_modules(directory, dense=[dense], prompts={"query": "a"}, max_seq_length=20)
    wanted = [path for path in sorted(directory.rglob("*")) if path.name.endswith(("config.json", ".safetensors"))]
    files = {f"model/{path.relative_to(directory)}": path.read_bytes() for path in wanted}
    if not labels:
        files["model/modules.json"] = (directory / "modules.json").read_bytes()
    return Subject(directory.name, files, "model")


if __name__ == "__main__":
    sys.exit(run_command(__doc__, EncoderBench, count=2000))
