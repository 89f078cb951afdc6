"""An encoder on ONNX Runtime, for bench/embeddings.py: exported, its layers fused, in float32 or with 8-bit weights.

Needs onnx and onnxruntime, which are not among Ostro's dependencies.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
import torch
import transformers


def export(model: str, directory: Path) -> Path:
    """The encoder's hidden states as an ONNX file, with the fusions of onnxruntime.transformers."""
    encoder = transformers.AutoModel.from_pretrained(model, attn_implementation="eager").eval()
    names, axes = ["input_ids", "attention_mask", "token_type_ids"], {0: "texts", 1: "tokens"}
    ones = torch.ones(2, 7, dtype=torch.long)
    torch.onnx.export(
        _States(encoder),
        (ones, ones, torch.zeros_like(ones)),
        str(directory / "plain.onnx"),
        input_names=names,
        output_names=["states"],
        dynamic_axes=dict.fromkeys((*names, "states"), axes),
        dynamo=False,
    )
    fused = import_module("onnxruntime.transformers.optimizer").optimize_model(
        str(directory / "plain.onnx"),
        model_type="bert",
        num_heads=encoder.config.num_attention_heads,
        hidden_size=encoder.config.hidden_size,
        opt_level=0,
    )
    fused.save_model_to_file(str(directory / "fused.onnx"))
    return directory / "fused.onnx"


def quantized(path: Path) -> Path:
    """The same with 8-bit weights, a scale per row, and inputs of matmuls that are quantised as they come."""
    quantization, onnx = import_module("onnxruntime.quantization"), import_module("onnx")
    target = path.with_name("int8.onnx")
    quantization.quantize_dynamic(
        str(path), str(target), per_channel=True, extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT}
    )
    return target


class OnnxEncoder:
    """Mean pooling and vectors of length one, as all-MiniLM-L6-v2 has them."""

    def __init__(self, path: Path, tokenizer: Path, *, threads: int, batch: int) -> None:
        runtime: Any = import_module("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        self._session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._batch = batch

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Texts of similar lengths are batched, and padded to the longest."""
        ids = [each.ids for each in self._tokenizer.encode_batch(list(texts))]
        order = sorted(range(len(ids)), key=lambda at: len(ids[at]))
        found: list[npt.NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(ids)
        for first in range(0, len(order), self._batch):
            part = order[first : first + self._batch]
            for at, vector in zip(part, self._vectors([ids[at] for at in part]), strict=True):
                found[at] = vector
        return np.stack(found)

    def _vectors(self, ids: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        tokens = np.zeros((len(ids), max(map(len, ids))), np.int64)
        mask = np.zeros_like(tokens)
        for row, (own, to) in enumerate(zip(ids, tokens, strict=True)):
            to[: len(own)], mask[row, : len(own)] = own, 1
        given = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": np.zeros_like(tokens)}
        states = self._session.run(None, given)[0]
        sums = (states * mask[..., None].astype(np.float32)).sum(1)
        vectors: npt.NDArray[np.float32] = sums / np.linalg.norm(sums, axis=1, keepdims=True)
        return vectors


class _States(torch.nn.Module):
    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.encoder(ids, attention_mask=mask, token_type_ids=types).last_hidden_state
        return states
