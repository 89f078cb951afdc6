"""What `deterministic` rules out on a GPU. Imports no torch: a backend asks before weights are read, a runner after."""

from ostro.errors import BadRequest, Unsupported


def check_deterministic(*, has_adapters: bool, unfused: str | None, quantizes: bool) -> None:
    """Raises BadRequest or Unsupported for what depends on the batch. `unfused` is why fused kernels do not run the
    model.
    """
    if has_adapters:
        raise Unsupported(
            "On a GPU the matmuls of adapters depend on the batch. Leave out either deterministic or the adapters.",
            param="deterministic",
        )
    if unfused is not None:
        raise BadRequest(
            "On a GPU deterministic needs the fused kernels, which do not run this model: "
            f"{unfused}. Leave deterministic off, or serve the model on a CPU.",
            param="deterministic",
        )
    if quantizes:
        raise BadRequest(
            "Matmuls of quantised weights depend on the batch. Leave out either deterministic or quantize.",
            param="deterministic",
        )
