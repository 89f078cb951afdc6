"""transformers' `generate` in fp32, in a process of its own, for `bench/cpu.py`: one job as JSON, one JSON line back.

One static batch of equal lengths, no padding: its best case. Prefill is a `generate` of one token; what a longer one
takes beyond that is decode.
"""

import json
import random
import sys
import time

import torch
import transformers

from ostro.weights import open_checkpoint

WARMUP_TOKENS = 4


def main() -> None:
    job = json.loads(sys.argv[1])
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(job["threads"])
    model = load(job["model"])
    dice = random.Random(job["seed"])
    found = []
    for streams in job["streams"]:
        ids = torch.tensor(
            [[dice.randrange(model.config.vocab_size) for _ in range(job["input"])] for _ in range(streams)]
        )
        generate_seconds(model, ids, WARMUP_TOKENS)
        first = generate_seconds(model, ids, 1)
        rest = generate_seconds(model, ids, job["output"] + 1) - first
        found.append(
            {"streams": streams, "prefill": ids.numel() / first, "decode": streams * job["output"] / max(rest, 1e-9)}
        )
    print(json.dumps({"version": transformers.__version__, "speeds": found}))


def load(path: str) -> transformers.LlamaForCausalLM:
    """The same weights, dequantised."""
    checkpoint = open_checkpoint(path)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**dict(checkpoint.config)))
    missing, unexpected = model.load_state_dict(dict(checkpoint.tensors()), strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    return model.eval()


def generate_seconds(model: transformers.LlamaForCausalLM, ids: torch.Tensor, tokens: int) -> float:
    began = time.perf_counter()
    with torch.inference_mode():
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
    seconds = time.perf_counter() - began
    assert whole.shape[1] == ids.shape[1] + tokens
    return seconds


if __name__ == "__main__":
    main()
