"""sentence-transformers' Dense modules, which pooled vectors pass through, in numpy: a text has only one vector."""

import math
from collections.abc import Callable, Mapping

import numpy as np

from ostro.kernels.cpu.packed_file import Floats
from ostro.models.tensor_errors import lacking, misshapen, no_place, not_finite, not_floats
from ostro.weights.encoder_files import dense_arrays
from ostro.weights.pooling import Dense, DenseActivation

_erf = np.vectorize(math.erf, otypes=[np.float32])
_ACTIVATIONS: Mapping[DenseActivation, Callable[[Floats], Floats]] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * (1 + _erf(x / np.float32(math.sqrt(2)))) / 2,
    "sigmoid": lambda x: np.float32(1) / (np.float32(1) + np.exp(-x)),
}


class DenseLayer:
    def __init__(self, described: Dense) -> None:
        self._act = _ACTIVATIONS[described.activation]
        wanted: dict[str, tuple[int, ...]] = {"linear.weight": (described.rows, described.columns)}
        if described.bias:
            wanted["linear.bias"] = (described.rows,)
        found: dict[str, Floats] = {}
        for name, weight in dense_arrays(described):
            if name not in wanted:
                raise no_place(name)
            if weight.shape != wanted[name]:
                raise misshapen(name, weight.shape, wanted[name])
            if not weight.is_float:
                raise not_floats(name, weight.format_name)
            found[name] = np.array(weight.floats(), np.float32)
            if not np.isfinite(found[name]).all():
                raise not_finite(name)
        if missing := wanted.keys() - found.keys():
            raise lacking(missing)
        self._weight, self._bias = found["linear.weight"], found.get("linear.bias")

    def __call__(self, vectors: Floats) -> Floats:
        # Row by row, because a matmul of several rows rounds in another order than that of one.
        return np.stack([self._one(vector) for vector in vectors])

    def _one(self, vector: Floats) -> Floats:
        products: Floats = self._weight @ vector
        return self._act(products if self._bias is None else products + self._bias)
