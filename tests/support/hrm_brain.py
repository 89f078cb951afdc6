"""A random HRM on disk: as AI-OS bundles a brain, or as upstream's trainer leaves a step."""

import json
from pathlib import Path
from typing import Literal

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor


def write_brain(
    directory: Path,
    *,
    dialect: Literal["upstream", "aios"] = "aios",
    moe: bool = False,
    seed: int = 0,
    vocab: int = 300,
    hidden: int = 32,
    heads: int = 4,
    h_layers: int = 2,
    l_layers: int = 2,
    h_cycles: int = 2,
    l_cycles: int = 2,
    inner: int = 48,
    seq_len: int = 128,
    positions: Literal["rope", "learned"] = "rope",
    halt_max_steps: int = 4,
    experts: int = 8,
    experts_per_token: int = 2,
    puzzle_size: int = 0,
) -> Path:
    """The weights' file: mind/actv1_student.safetensors below brain.json, or step_100 beside all_config.yaml."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = random_weights(
        seed=seed,
        vocab=vocab,
        hidden=hidden,
        h_layers=h_layers,
        l_layers=l_layers,
        inner=inner,
        experts=experts if moe else 0,
        position_rows=seq_len - -puzzle_size // hidden if positions == "learned" else 0,
        puzzle_size=puzzle_size,
        scaled=dialect == "upstream" or hidden >= 512,
    )
    arch: dict[str, object] = {
        "H_cycles": h_cycles,
        "L_cycles": l_cycles,
        "H_layers": h_layers,
        "L_layers": l_layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "expansion": 4,
        "pos_encodings": positions,
        "halt_max_steps": halt_max_steps,
        "puzzle_emb_ndim": puzzle_size,
    }
    if moe:
        arch |= {"num_experts": experts, "num_experts_per_tok": experts_per_token}
    if dialect == "upstream":
        arch |= {"name": "hrm.hrm_act_v1@HierarchicalReasoningModel_ACTV1", "seq_len": seq_len}
        (directory / "all_config.yaml").write_text(yaml.safe_dump({"arch": arch, "epochs": 1}))
        path = directory / "step_100"
        torch.save({f"_orig_mod.model.{name}": tensor for name, tensor in weights.items()}, path)
        return path
    top = {key.lower(): value for key, value in arch.items()} | {"seq_len": seq_len, "use_moe": moe}
    (directory / "brain.json").write_text(json.dumps({"type": "actv1", **top}))
    (directory / "mind").mkdir(exist_ok=True)
    path = directory / "mind" / "actv1_student.safetensors"
    save_file(weights, path)
    return path


def random_weights(
    *,
    seed: int = 0,
    vocab: int = 300,
    hidden: int = 32,
    h_layers: int = 2,
    l_layers: int = 2,
    inner: int = 48,
    experts: int = 0,
    position_rows: int = 0,
    puzzle_size: int = 0,
    scaled: bool = False,
    gain: float = 2.0,
) -> dict[str, Tensor]:
    """Wide enough that greedy choices are clear and depend on all of the context; with a `gain` of 1 as at the start
    of training, when rounding errors do not grow. Embeddings that are `scaled` wait for √hidden.
    """
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int, spread: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator) * spread

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return numbers(rows, columns, spread=gain * columns**-0.5)

    embedding_spread = hidden**-0.5 if scaled else 1.0
    weights = {
        "inner.embed_tokens.embedding_weight": numbers(vocab, hidden, spread=embedding_spread),
        "inner.lm_head.weight": matrix(vocab, hidden, gain=1.5 * gain),
        "inner.q_head.weight": matrix(2, hidden),
        "inner.q_head.bias": numbers(2, spread=0.1),
        "inner.H_init": numbers(hidden),
        "inner.L_init": numbers(hidden),
    }
    if position_rows:
        weights["inner.embed_pos.embedding_weight"] = numbers(position_rows, hidden, spread=embedding_spread)
    if puzzle_size:
        weights["inner.puzzle_emb.weights"] = numbers(3, puzzle_size, spread=embedding_spread)
    for level, layers in (("H", h_layers), ("L", l_layers)):
        for layer in range(layers):
            prefix = f"inner.{level}_level.layers.{layer}"
            weights[f"{prefix}.self_attn.qkv_proj.weight"] = matrix(3 * hidden, hidden, gain=gain)
            weights[f"{prefix}.self_attn.o_proj.weight"] = matrix(hidden, hidden, gain=gain)
            if not experts:
                weights[f"{prefix}.mlp.gate_up_proj.weight"] = matrix(2 * inner, hidden, gain=gain)
                weights[f"{prefix}.mlp.down_proj.weight"] = matrix(hidden, inner, gain=gain)
                continue
            weights[f"{prefix}.mlp.moe.router.gate.weight"] = matrix(experts, hidden, gain=gain)
            for expert in range(experts):
                weights[f"{prefix}.mlp.moe.experts.{expert}.w1.weight"] = matrix(inner, hidden, gain=gain)
                weights[f"{prefix}.mlp.moe.experts.{expert}.w2.weight"] = matrix(hidden, inner, gain=gain)
    return weights
