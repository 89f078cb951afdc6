"""How many pages fit. Knows a model's shape and the machine's memory; allocates nothing."""

import os
import sys
from pathlib import Path

from ostro.errors import BadRequest, ModelError
from ostro.models.base import ModelShape

# Of the memory that is free once the weights are loaded: room is left for activations and for everyone else.
_SHARE = 0.4
_MOST = 4 << 30


def page_bytes(shape: ModelShape, page_size: int, itemsize: int) -> int:
    return shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * page_size * itemsize


def num_pages(shape: ModelShape, *, page_size: int, itemsize: int, kv_memory: int | None, max_batch_seqs: int) -> int:
    """Pages within `kv_memory` bytes, or within a share of the free memory; no more than could ever be used at once."""
    each = page_bytes(shape, page_size, itemsize)
    useful = max_batch_seqs * -(-shape.max_seq_len // page_size)
    if kv_memory is not None:
        if kv_memory < each:
            raise BadRequest(
                f"kv_memory must hold at least one page ({each} bytes), got {kv_memory}.", param="kv_memory"
            )
        if kv_memory > (free := free_memory()):
            raise BadRequest(f"kv_memory is {kv_memory} bytes, but only {free} are free; lower it.", param="kv_memory")
        return kv_memory // each
    budget = min(int(free_memory() * _SHARE), _MOST)
    if budget < each:
        raise ModelError(
            f"One page takes {each} bytes and {budget} are free for keys and values; free some, or lower page_size."
        )
    return min(budget // each, useful)


def gpu_num_pages(
    shape: ModelShape,
    *,
    page_size: int,
    itemsize: int,
    kv_memory: int | None,
    utilization: float,
    max_batch_tokens: int,
    max_batch_seqs: int,
) -> int:
    """Pages within `kv_memory` bytes, or within the GPU's memory beside the model, which is loaded, and one step."""
    import torch

    each = page_bytes(shape, page_size, itemsize)
    free, total = torch.cuda.mem_get_info()
    # Beside a step's activations, which are a few times the widest row a token, its logits, in float32 and again in
    # the model's dtype, with what sampling makes of them; and a little for kernels, graphs and libraries.
    widest = max(shape.hidden_size * 16, shape.num_heads * shape.head_dim * 8)
    step = max_batch_tokens * widest * itemsize + max_batch_seqs * shape.vocab_size * 8 + (1 << 30)
    budget = int(total * utilization) - (total - free) - step
    if kv_memory is not None:
        if kv_memory > free - step:
            raise BadRequest(
                f"kv_memory is {kv_memory} bytes, but only {max(0, free - step)} are left for it; lower it.",
                param="kv_memory",
            )
        budget = kv_memory
    # The runner keeps one page for rows that only fill up a batch.
    if budget < 2 * each:
        raise ModelError(
            f"Two pages take {2 * each} bytes and {max(0, budget)} are left of the GPU's memory for keys and values; "
            "raise gpu_memory_utilization, lower max_batch_tokens, or take a smaller model."
        )
    return budget // each - 1


def free_memory() -> int:
    """Bytes that can be had without swapping, within the container's limit if there is one."""
    return min(_free_on_machine(), _free_in_container())


def _free_on_machine() -> int:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _free_in_container(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    limit, used = (_lines(cgroup / name) for name in ("memory.max", "memory.current"))
    if not limit or not used or limit[0] == "max":
        return sys.maxsize
    return max(0, int(limit[0]) - int(used[0]))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
