"""Options shared by several commands: engine settings and sampling parameters."""

import argparse
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

from ostro.cli.files import read_text
from ostro.config import (
    BackendName,
    Device,
    DType,
    EngineConfig,
    GenerationConfig,
    HrmDialect,
    KVDType,
    Quantization,
    Speculative,
    TensorParallel,
    ToolFormat,
    meaning_of,
    read_devices,
    read_size,
)
from ostro.errors import BadRequest
from ostro.sampling_params import PARAMETERS, SamplingParams


def memory_size(text: str) -> int:
    """`read_size`, with argparse's error."""
    try:
        return read_size(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a memory size; write 512M or 2G") from None


def number_of_devices(text: str) -> TensorParallel:
    """`read_devices`, with argparse's error."""
    try:
        return read_devices(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--model", metavar="REF", help=_meaning("model"))
    group.add_argument("--model-config", metavar="FILE", help=_meaning("model_config"))
    group.add_argument("--tokenizer", metavar="REF", help=_meaning("tokenizer"))
    group.add_argument("--chat-template", metavar="NAME", help=_meaning("chat_template"))
    group.add_argument("--tool-format", choices=get_args(ToolFormat), default="auto", help=_meaning("tool_format"))
    group.add_argument(
        "--generation-config", choices=get_args(GenerationConfig), default="auto", help=_meaning("generation_config")
    )
    add_size_options(group)
    group.add_argument(
        "--no-cuda-graphs",
        action="store_true",
        help="on a GPU, launch kernels one by one instead of replaying CUDA graphs",
    )
    group.add_argument("--kv-disk", metavar="DIR", help=_meaning("kv_disk"))
    group.add_argument("--kv-disk-size", type=memory_size, metavar="SIZE", help=_meaning("kv_disk_size"))
    group.add_argument("--kv-persist", action="store_true", help=_meaning("kv_persist"))
    group.add_argument("--kv-shared", metavar="DIR", help=_meaning("kv_shared"))
    group.add_argument("--kv-shared-size", type=memory_size, metavar="SIZE", help=_meaning("kv_shared_size"))
    group.add_argument("--deterministic", action="store_true", help=_meaning("deterministic"))
    add_kernel_option(group)
    group.add_argument(
        "--cascade-attention",
        action=argparse.BooleanOptionalAction,
        default=True,
        help=_meaning("cascade_attention"),
    )
    group.add_argument(
        "--no-prefix-caching", action="store_true", help="do not reuse the KV cache of shared prompt prefixes"
    )
    group.add_argument("--speculative", choices=get_args(Speculative), default="auto", help=_meaning("speculative"))
    group.add_argument("--hrm-dialect", choices=get_args(HrmDialect), default="auto", help=_meaning("hrm_dialect"))
    group.add_argument("--hrm-config", metavar="FILE", help=_meaning("hrm_config"))
    for name in ("num_heads", "h_cycles", "l_cycles", "h_layers", "l_layers"):
        flag = name.replace("_", "-")
        group.add_argument(
            f"--{flag}", f"--hrm-{flag}", dest=f"hrm_{name}", type=int, metavar="N", help=_meaning(f"hrm_{name}")
        )
    group.add_argument("--hrm-steps", type=int, metavar="N", help=_meaning("hrm_steps"))
    group.add_argument("--hrm-halting", action="store_true", help=_meaning("hrm_halting"))
    group.add_argument("--threads", type=int, metavar="N", help=_meaning("threads"))


def add_kernel_option(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--kernel-choices",
        metavar="auto|off|FILE",
        default="auto",
        help=f"{_meaning('kernel_choices')} (default: auto)",
    )


def add_size_options(group: argparse._ArgumentGroup) -> None:
    """Options that affect memory use."""
    default = EngineConfig()
    group.add_argument("--max-seq-len", type=int, metavar="N", help=_meaning("max_seq_len"))
    group.add_argument("--device", choices=get_args(Device), default="auto", help=_meaning("device"))
    group.add_argument("--dtype", choices=get_args(DType), default="auto", help=_meaning("dtype"))
    group.add_argument("--quantize", choices=get_args(Quantization), default="none", help=_meaning("quantize"))
    group.add_argument("--kv-dtype", choices=get_args(KVDType), default="auto", help=_meaning("kv_dtype"))
    group.add_argument(
        "--backend", "--cpu-backend", choices=get_args(BackendName), default="auto", help=_meaning("backend")
    )
    group.add_argument(
        "--tensor-parallel",
        "--tensor-parallel-size",
        type=number_of_devices,
        metavar="N",
        default=1,
        help=_meaning("tensor_parallel"),
    )
    group.add_argument("--page-size", type=int, metavar="N", help=_meaning("page_size"))
    group.add_argument("--kv-memory", type=memory_size, metavar="SIZE", help=_meaning("kv_memory"))
    group.add_argument("--kv-host-memory", type=memory_size, metavar="SIZE", help=_meaning("kv_host_memory"))
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        metavar="X",
        default=default.gpu_memory_utilization,
        help=f"{_meaning('gpu_memory_utilization')} (default: %(default)s)",
    )
    group.add_argument("--max-batch-tokens", type=int, metavar="N", help=_meaning("max_batch_tokens"))
    group.add_argument("--max-batch-seqs", type=int, metavar="N", help=_meaning("max_batch_seqs"))


def _meaning(name: str) -> str:
    """Escaped for argparse, which interprets per cent signs."""
    return meaning_of(name).replace("%", "%%")


def size_config(args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        model=args.model,
        max_seq_len=args.max_seq_len,
        device=args.device,
        dtype=args.dtype,
        quantize=args.quantize,
        kv_dtype=args.kv_dtype,
        backend=args.backend,
        tensor_parallel=args.tensor_parallel,
        page_size=args.page_size,
        kv_memory=args.kv_memory,
        kv_host_memory=args.kv_host_memory,
        gpu_memory_utilization=args.gpu_memory_utilization,
        max_batch_tokens=args.max_batch_tokens,
        max_batch_seqs=args.max_batch_seqs,
    )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    return replace(
        size_config(args),
        model_config=args.model_config,
        tokenizer=args.tokenizer,
        chat_template=args.chat_template,
        tool_format=args.tool_format,
        generation_config=args.generation_config,
        cuda_graphs=not args.no_cuda_graphs,
        kv_disk=args.kv_disk,
        kv_disk_size=args.kv_disk_size,
        kv_persist=args.kv_persist,
        kv_shared=args.kv_shared,
        kv_shared_size=args.kv_shared_size,
        deterministic=args.deterministic,
        kernel_choices=args.kernel_choices,
        cascade_attention=args.cascade_attention,
        prefix_caching=not args.no_prefix_caching,
        speculative=args.speculative,
        hrm_dialect=args.hrm_dialect,
        hrm_config=args.hrm_config,
        hrm_num_heads=args.hrm_num_heads,
        hrm_h_cycles=args.hrm_h_cycles,
        hrm_l_cycles=args.hrm_l_cycles,
        hrm_h_layers=args.hrm_h_layers,
        hrm_l_layers=args.hrm_l_layers,
        hrm_steps=args.hrm_steps,
        hrm_halting=args.hrm_halting,
        threads=args.threads,
    )


# The commands' sampling options, by name. Omitted ones take the command's or the model's default.
_SAMPLING = {each.name: each.type for each in fields(SamplingParams) if each.name in PARAMETERS}
_SAMPLING = {name: kind for name, kind in _SAMPLING.items() if PARAMETERS[name].is_option}


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for name, kind in _SAMPLING.items():
        flag, text = f"--{name.replace('_', '-')}", PARAMETERS[name].meaning.replace("%", "%%")
        if kind is bool:
            group.add_argument(flag, action="store_true", help=text)
        elif kind == tuple[str, ...]:
            group.add_argument(flag, action="append", default=[], metavar="TEXT", help=f"{text}; repeatable")
        elif kind is float:
            group.add_argument(flag, type=float, metavar="X", help=text)
        else:
            group.add_argument(flag, type=int, metavar="N", help=text)


def add_structured_options(parser: argparse.ArgumentParser) -> None:
    """Options for structured outputs. See `structured_fields`."""
    group = parser.add_argument_group("structured output")
    group.add_argument("--json", action="store_true", help="answer with a JSON object")
    group.add_argument(
        "--json-schema", metavar="FILE", help="answer with JSON that matches this schema: a file, or the schema itself"
    )
    group.add_argument(
        "--lenient",
        action="store_true",
        help="ignore the parts of the schema that cannot be enforced, instead of refusing it",
    )
    group.add_argument("--regex", metavar="TEXT", help="answer with text that this regular expression matches")
    group.add_argument("--choice", action="append", metavar="TEXT", help="answer with one of these texts; repeatable")
    group.add_argument(
        "--grammar", metavar="FILE", help="answer with text that matches this grammar, in GBNF or in Lark's notation"
    )
    group.add_argument(
        "--jump-forward", action="store_true", help="append the only possible tokens without sampling them"
    )


def structured_fields(args: argparse.Namespace) -> dict[str, object]:
    """Request fields for the options of `add_structured_options`. Raises BadRequest for a file that cannot be read."""
    given: dict[str, object] = {}
    if args.json:
        given["response_format"] = {"type": "json_object"}
    if args.json_schema is not None:
        schema = args.json_schema if args.json_schema.lstrip().startswith("{") else read_text(Path(args.json_schema))
        given["structured_outputs"] = {"json": schema, "strict": not args.lenient}
    elif args.lenient:
        raise BadRequest("--lenient is for --json-schema: leave it out.")
    if args.regex is not None:
        given["regex"] = args.regex
    if args.choice is not None:
        given["guided_choice"] = args.choice
    if args.grammar is not None:
        given["grammar"] = read_text(Path(args.grammar))
    if args.jump_forward:
        given["jump_forward"] = True
    return given


def sampling_params(args: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    given = {name: getattr(args, name) for name in _SAMPLING}
    return defaults.with_changes(**{name: value for name, value in given.items() if value is not None})
