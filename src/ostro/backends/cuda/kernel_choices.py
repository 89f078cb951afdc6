"""Which of a model's matmuls on a GPU will use our own kernels, as far as that is known without loading it."""

from collections.abc import Container, Mapping

from ostro.backends.cuda.choices import Choices, described_matmuls, known_for
from ostro.backends.cuda.fusible import why_unfused
from ostro.config import ResolvedConfig
from ostro.devices import DEVICE_KINDS
from ostro.models.description import Causal, plain_decoder
from ostro.system.machine import gpu_name

MEASURED_LATER = "measured at the first start"


def own_kernels(config: ResolvedConfig, described: Causal, kept: Container[str] = ()) -> Mapping[str, str] | None:
    """For each matmul the numbers of rows for which it is ours, but for tensors that are `kept` quantised; None if this
    machine's GPU, or the model's shapes on it, are not known, or if another format or mode decides.
    """
    decided = config.deterministic or config.quantize != "none" or config.tensor_parallel > 1
    if decided:
        return None
    gpu, decoder = gpu_name(), plain_decoder(described)
    if gpu is None or isinstance(decoder, str) or why_unfused(described) is not None:
        return None
    choices = known_for(config.kernel_choices, gpu)
    if choices is None:
        if config.kernel_choices != "auto":
            return None
        choices = Choices()
    bits = 32 if DEVICE_KINDS["cuda"].compute_dtype(config.dtype) == "float32" else 16
    return {
        name: MEASURED_LATER if config.kernel_choices == "auto" and each not in choices else choices.own_rows(each)
        for name, each in described_matmuls(decoder, bits, kept).items()
    }
