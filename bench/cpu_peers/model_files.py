"""The GGUF files that both engines run, made once in a work directory. Knows formats; measures nothing."""

from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader

from cpu_peers.llama_cpp import LlamaCpp
from ostro.weights import open_checkpoint


class ModelFiles:
    """`default` is the default model's own file; `f32`, `q8_0`, `q4_0` are made from it by llama.cpp's quantiser."""

    def __init__(self, work: Path, llama: LlamaCpp) -> None:
        self._work = work
        self._llama = llama
        work.mkdir(parents=True, exist_ok=True)

    def variant(self, name: str) -> Path:
        source = open_checkpoint(None).path
        if name == "default":
            return source
        if name == "f32":
            return self.made(source, f"{source.stem}.f32.gguf", "F32")
        return self.made(self.variant("f32"), f"{source.stem}.{name}.gguf", name.upper())

    def made(self, source: Path, name: str, kind: str) -> Path:
        """The source as the quantiser makes it, unless a file of that name is there."""
        target = self._work / name
        if not target.is_file():
            self._llama.quantize(source, target, kind)
        return target


def tensor_types(path: Path) -> dict[str, int]:
    """Number of tensors of each type in a file."""
    found: dict[str, int] = {}
    for tensor in GGUFReader(path).tensors:
        name = GGMLQuantizationType(tensor.tensor_type).name
        found[name] = found.get(name, 0) + 1
    return found
