"""ostro plan: how much memory a model needs and how many sequences fit, from its files' headers. Neither loads nor
downloads weights.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace

from ostro.backends.planning import Plan, plan
from ostro.cli.options import add_plan_options, engine_config, memory_size
from ostro.cli.parser import describe
from ostro.devices import DEVICE_KINDS

_MIB, _GIB = 1 << 20, 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="short name, directory, file, Hub id, gs://, s3:// or pypi:NAME==VERSION (default: smollm2-135m)",
    )
    parser.add_argument(
        "--memory",
        type=memory_size,
        metavar="SIZE",
        help="plan for this much free memory instead of this machine's, such as 16G",
    )
    parser.add_argument("--json", action="store_true", help="print all figures as JSON, in bytes")
    add_plan_options(parser)
    describe(
        parser,
        {
            "ostro plan ./my-model": "on this machine",
            "ostro plan Qwen/Qwen3-0.6B --memory 16G --device cuda": "on a GPU of 16 GB",
            "ostro plan ./my-model --device tpu --memory 16G --tensor-parallel 8": "on eight TPUs of 16 GB",
        },
        "The exit status is 0 if the model fits and 1 if it does not.",
    )


def run(args: argparse.Namespace) -> int:
    """0 if the model fits, 1 if not."""
    # Plans for serving; offline, a step has more tokens and needs slightly more memory.
    config = replace(engine_config(args), serving=True)
    found = plan(args.model, config, memory=args.memory)
    print(json.dumps(asdict(found) | {"fits": found.fits}, indent=2) if args.json else _table(found))
    return 0 if found.fits else 1


def _table(plan: Plan) -> str:
    kind = DEVICE_KINDS[plan.device]
    second = f", including {_size(plan.second_layout_bytes)} for a faster layout" if plan.second_layout_bytes else ""
    active = plan.active_parameters < plan.parameters
    fewer = f", {plan.active_parameters / 1e6:,.0f} million of them active" if active else ""
    read = f", {_size(plan.active_bytes)} of it active for a token" if active else ""
    rows = {
        "model": f"{plan.model}, {plan.parameters / 1e6:,.0f} million parameters{fewer}",
        "runs on": f"{plan.backend}, {plan.precision}",
        "weights": f"{_size(plan.weights_bytes)}{second}{read}",
        "keys and values": f"{_size(plan.kv_bytes)}, {plan.num_pages} pages of {plan.page_size} tokens"
        if plan.page_bytes
        else "none, an encoder keeps nothing",
        **_states(plan),
        "other": f"{_size(plan.other_bytes)}, the process and a step's work",
        "total": f"{_size(plan.total_bytes)} of {_size(plan.memory)} that are free ({_where(plan)})",
    }
    if plan.stored_as is not None:
        rows["stored as"] = plan.stored_as
    if plan.not_native is not None:
        rows["not natively"] = plan.not_native
    if kind.has_own_memory:
        rows["on the host"] = f"about {_size(plan.host_bytes)}" + _experts(plan)
    if plan.peak_bytes > plan.total_bytes:
        rows["at most"] = f"{_size(plan.peak_bytes)}, {_peak(plan)}"
    if plan.own_kernels is not None:
        rows["own kernels"] = "; ".join(f"{name} {rows}" for name, rows in plan.own_kernels.items()) + " rows"
    if plan.fits:
        rows |= {
            "longest sequence": f"{plan.max_seq_len} tokens",
            "at a time": f"{plan.max_batch_seqs} sequences at most",
        }
    lines = [f"{label + ':':<18}{value}" for label, value in rows.items()]
    if not plan.fits:
        return "\n".join([*lines, "", _shortage(plan)])
    lines += ["", f"{'tokens each':>12}  sequences at a time"]
    return "\n".join([*lines, *(f"{fit.length:>12}  {fit.sequences}" for fit in plan.sequences)])


def _states(plan: Plan) -> dict[str, str]:
    if not plan.state_bytes:
        return {}
    size = _size(plan.num_states * plan.state_bytes)
    return {"states": f"{size}, {plan.num_states} slots for sequences that run and for snapshots of prefixes"}


def _experts(plan: Plan) -> str:
    if plan.cpu is None:
        return ""
    free = "" if plan.host_memory is None else f" of {_size(plan.host_memory)} that are free"
    return f"{free}, with {_size(plan.cpu.nbytes)} for the experts of {plan.cpu.layers} layers, which the CPU computes"


def _where(plan: Plan) -> str:
    kind = DEVICE_KINDS[plan.device]
    if plan.devices == 1 or not kind.has_own_memory:
        return kind.label
    return f"each of {plan.devices} {kind.label}s, as are the sizes above"


def _peak(plan: Plan) -> str:
    if plan.runs_on == "native":
        return "while the weights are packed, once"
    return "while it is loaded, mapped files included"


def _shortage(plan: Plan) -> str:
    if plan.fits_device:
        return f"This machine's own memory is too small for the experts. {_listed(_host_cures(plan))}"
    both = "" if plan.fits_host else " Neither does this machine's own memory hold the experts."
    return f"It does not fit.{both} {_listed(_device_cures(plan))}"


def _listed(cures: Iterable[str]) -> str:
    return f"{', '.join(cures)}, or take a smaller model."


def _host_cures(plan: Plan) -> Iterator[str]:
    yield "Lower --cpu-experts"
    if plan.cpu is not None and plan.cpu.formats != "int4":
        yield "try --quantize int4"


def _device_cures(plan: Plan) -> Iterator[str]:
    kind = DEVICE_KINDS[plan.device]
    yield "Give it more memory"
    yield "lower --kv-memory"
    if plan.movable and plan.fits_host:
        yield "try --cpu-experts auto" if plan.cpu is None else "raise --cpu-experts"
    on_jax = plan.runs_on == "jax"
    if kind.name == "cuda" and not on_jax and plan.active_parameters < plan.parameters:
        # A mixture of experts has 16 bits there, and is on one GPU.
        return
    if kind.name == "cuda" and not on_jax and plan.state_bytes:
        # A model with recurrent states has 16 bits there, too.
        return
    if kind.smaller and not on_jax:
        yield f"try {kind.smaller}"
    # Ranks on a CPU would share its memory.
    if kind.has_own_memory:
        yield "raise --tensor-parallel"


def _size(bytes: int) -> str:
    return f"{bytes / _GIB:.1f} GiB" if bytes >= 10 * _GIB else f"{bytes / _MIB:,.0f} MiB"
