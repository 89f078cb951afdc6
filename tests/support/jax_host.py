"""One process of a mesh over several: the first generates and prints its tokens, the others follow it.

python jax_host.py DEVICES    with JAX's environment of a process
"""

import json
import sys

import jax
import numpy as np
from jax_models import FAMILIES, jax_runner
from native_models import savable_model

from ostro.backends.jax.hosts import join_hosts
from ostro.backends.jax.runner import JaxRunner
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.engine.runner import ModelRunner
from ostro.engine.scheduler import Limits
from ostro.sampling_params import SamplingParams
from ostro.weights.adapter import LowRank

CONFIG = FAMILIES["llama"]
DEVICES = 4
PARAMS = (
    SamplingParams(max_tokens=8, temperature=0),
    SamplingParams(max_tokens=8, temperature=1.0, n=3, logprobs=2),
    SamplingParams(max_tokens=8, temperature=0.8, top_k=20, top_p=0.9),
    SamplingParams(max_tokens=8, temperature=0, repetition_penalty=1.5, logit_bias={7: 2.0}),
    SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=1),
)

ADAPTER = "up"

Answers = list[tuple[int, int, list[int], list[float]]]


def main(devices: str) -> None:
    jax.config.update("jax_num_cpu_devices", int(devices))
    join_hosts()
    runner = adapted_runner()
    if jax.process_index():
        runner.follow()
        return
    print(json.dumps(answers(runner)))


def adapted_runner() -> JaxRunner:
    """With an adapter of two projections, whose terms are divided in different ways."""
    random = np.random.default_rng(9)

    def term(out: int, inputs: int) -> LowRank:
        a, b = (random.normal(size=size).astype(np.float32) for size in ((3, inputs), (out, 3)))
        return LowRank(a, b, 0.3)

    terms = {"model.layers.1.mlp.up_proj": term(48, 32), "model.layers.0.mlp.down_proj": term(32, 48)}
    return jax_runner(CONFIG, savable_model(CONFIG), tp=DEVICES, adapters={ADAPTER: terms})


def answers(runner: ModelRunner) -> Answers:
    """Answers to a few requests: request, choice, tokens, and log-probabilities to two digits."""
    random = np.random.default_rng(5)
    core = EngineCore(runner, Limits(max_batch_tokens=48, max_batch_seqs=8), adapters=(ADAPTER,))
    for id, (length, params) in enumerate(zip((3, 21, 40, 10, 12), PARAMS, strict=True)):
        prompt = tuple(random.integers(0, 300, length).tolist())
        scored = None if params.prompt_logprobs is None else 1
        adapter = ADAPTER if id % 2 else None
        core.add(
            Request(id=id, prompt_ids=prompt, params=params, seed=id, prompt_logprobs_from=scored, adapter=adapter)
        )
    found: dict[tuple[int, int], tuple[list[int], list[float]]] = {}
    while core.has_work:
        for step in core.step():
            tokens, logprobs = found.setdefault((step.request_id, step.choice), ([], []))
            tokens.extend(step.token_ids)
            logprobs.extend(round(each.logprob, 2) for each in (*step.prompt_logprobs, *step.logprobs))
    core.check_integrity()
    return [(*key, *value) for key, value in sorted(found.items())]


if __name__ == "__main__":
    main(*sys.argv[1:])
