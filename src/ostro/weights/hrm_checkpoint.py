"""A Hierarchical Reasoning Model as a Checkpoint: AI-OS brains, and the steps of the upstream trainer.

    brain.json                        AI-OS; the architecture at top level, in `arch`, in `last_session.config`
    checkpoint_metadata.json
    mind/actv1_student.safetensors    or beside brain.json; older ones .pt

    all_config.yaml                   upstream; the architecture in `arch`
    checkpoint                        torch.save output as published; step_1000 as named by the trainer

`hrm_settings` interprets the config files. Pickles go through torch's weights-only loader, which runs no code.
"""

import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ostro.errors import BadCheckpoint, ModelNotFound, OstroError, Unsupported
from ostro.formats.json_file import read_json_object
from ostro.formats.torch_archive import tensor_shapes
from ostro.sources.files import (
    BRAIN,
    BRAIN_Q_HEAD,
    HRM_PUBLISHED,
    LEGACY_STUDENT,
    STUDENT,
    brain_students,
    hrm_step,
)
from ostro.weights.hrm_settings import (
    HrmSettings,
    SettingTables,
    Shapes,
    hrm_config,
    is_upstream,
    lower_keys,
    nearby,
    read_settings_files,
)
from ostro.weights.pooling import Pooling
from ostro.weights.stored import Stored
from ostro.weights.tensor_files import read_pickle, read_safetensors

if TYPE_CHECKING:
    import torch

    from ostro.weights.arrays import WeightArray
    from ostro.weights.slices import SlicedWeight

_STARTER = "starter_brain.json"
_TOKENIZERS = ("tokenizer.json", "vocab.txt")
_PICKLES = (".pt", ".pth", ".bin")
_Q_HEAD = "inner.q_head."
# Tables with one row per token.
_TABLES = ("inner.embed_tokens.embedding_weight", "inner.lm_head.weight")
# Prefixes added by torch.compile and by the loss module that wraps the model.
_WRAPPERS = re.compile(r"^(?:_orig_mod\.|model\.)+")
_log = logging.getLogger(__name__)
_BASE_KEYS = ("base_model", "base_model_name_or_path", "model_name_or_path", "hf_model", "model_name", "model")


@dataclass(frozen=True, slots=True)
class HrmCheckpoint:
    path: Path
    name: str
    config: dict[str, object]
    generation_config: dict[str, object]
    pooling: Pooling | None
    weights: Path
    shapes: Shapes
    stated: SettingTables

    def with_settings(self, settings: HrmSettings) -> "HrmCheckpoint":
        """The same weights; the operator's settings override those in the files."""
        return replace(self, config=hrm_config(self.shapes, self.stated.below(settings)))

    @property
    def tokenizer_path(self) -> Path:
        beside = (self.weights.parent, _home(self.weights))
        places = [place for directory in beside for place in (directory, directory / "tokenizer")]
        named = self.stated.find("tokenizer_model")
        if named is not None and isinstance(named[1], str):
            # AI-OS writes it relative to its working directory.
            places += [_home(self.weights) / named[1], Path(named[1])]
        found = next((place for place in places if any((place / file).is_file() for file in _TOKENIZERS)), None)
        if found is None:
            raise ModelNotFound(
                f"There is no tokenizer.json or vocab.txt with {self.weights}. Give --tokenizer ORG/NAME, or its "
                "directory: the one that the model was trained with.",
                param="tokenizer",
            )
        return found

    @property
    def files(self) -> list[Path]:
        head = self._q_head_file()
        return sorted([self.weights] if head is None else [self.weights, head])

    def stored(self) -> Stored:
        raise Unsupported(
            f"{self.name} is an HRM, which keeps no keys and values: its memory does not depend on how many "
            "sequences run. Load it to see."
        )

    def arrays(self) -> Iterator[tuple[str, "WeightArray"]]:
        raise Unsupported(f"{self.name} is an HRM, which torch runs: its weights are read as torch's tensors.")

    def slices(self) -> Iterator[tuple[str, "SlicedWeight"]]:
        from ostro.weights.slices import sliced

        return sliced(self.arrays())

    def tensors(self) -> Iterator[tuple[str, "torch.Tensor"]]:
        """Weights under the upstream model's names, memory-mapped where the file format allows."""
        if self.weights.suffix == ".safetensors":
            stored = read_safetensors(self.weights, frozenset(_safetensors_shapes(self.weights)))
        else:
            stored = read_pickle(self.weights, frozenset())
        rows, wanted = self.shapes.rows(_TABLES[0]), self.config["vocab_size"]
        assert isinstance(wanted, int)
        if rows != wanted:
            _log.warning(
                "%s says that the vocabulary has %d tokens, and the weights have %d: %s, as AI-OS does",
                self.stated.files,
                wanted,
                rows,
                "the rest is cut off" if rows > wanted else "untrained rows are added",
            )
        for stored_name, tensor in stored:
            name = _WRAPPERS.sub("", stored_name)
            yield name, _with_rows(tensor, wanted) if name in _TABLES and rows != wanted else tensor
        yield from self._own_q_head()

    def _q_head_file(self) -> Path | None:
        file = self.weights.parent / BRAIN_Q_HEAD
        has_own = any(name.startswith(_Q_HEAD) for name in self.shapes.of)
        return file if file.is_file() and not has_own else None

    def _own_q_head(self) -> Iterator[tuple[str, "torch.Tensor"]]:
        """The q-head that AI-OS stores in a separate file, if the weights include none."""
        if (file := self._q_head_file()) is None:
            return
        _log.info("the q-head comes from %s", file)
        for name, tensor in read_pickle(file, frozenset()):
            yield _Q_HEAD + name.rpartition(".")[2], tensor


def is_hrm(path: Path) -> bool:
    """Whether `open_hrm` should open this file or directory, judging by names and headers."""
    if path.is_dir():
        return bool(_students(path) or (_steps(path) and is_upstream(path)))
    if not path.is_file() or path.name == BRAIN_Q_HEAD:
        return False
    if path.name in (STUDENT, LEGACY_STUDENT):
        return True
    if hrm_step(path.name) is not None:
        return is_upstream(path.parent) or nearby(path.parent, BRAIN) is not None
    if path.suffix not in (".safetensors", *_PICKLES):
        return False
    try:
        return "inner.H_init" in _shapes(path).of
    except OstroError:
        return False


def open_hrm(path: Path, *, name: str | None = None) -> HrmCheckpoint:
    """Opens a brain (its directory or its weights), or one step of the upstream trainer."""
    weights = _weights_in(path) if path.is_dir() else path
    shapes, stated = _shapes(weights), read_settings_files(weights)
    return HrmCheckpoint(
        path=path,
        name=name or _name(weights, _home(weights)),
        config=hrm_config(shapes, stated),
        generation_config={},
        pooling=None,
        weights=weights,
        shapes=shapes,
        stated=stated,
    )


def is_starter(path: Path) -> bool:
    """Whether this is AI-OS's other kind of brain: a q-head on top of a Hugging Face model."""
    return _starter_file(path) is not None


def starter_base(path: Path) -> str:
    """The reference of the model under such a brain; a local path is made absolute and must be inside the brain's
    directory: the operator vouched only for the brain, so its file may not point elsewhere.
    """
    file = _starter_file(path)
    if file is None:
        raise ModelNotFound(f"There is no {_STARTER} at {path}. Give the directory that holds it.")
    table = lower_keys(read_json_object(file))
    for key in _BASE_KEYS:
        value = table.get(key)
        if isinstance(value, str) and value:
            # For a path missing from the brain, `open_checkpoint` would look in the working directory.
            places = (file.parent / value, Path(os.path.expanduser(value)))
            local = next((place for place in places if os.path.exists(place)), None)
            return value if local is None else str(_trusted(local, file).absolute())
    raise BadCheckpoint(f"{file} does not name its base model: it has no {' or '.join(map(repr, _BASE_KEYS[:3]))}.")


# --- files ----------------------------------------------------------------------------------------------------------


def _students(directory: Path) -> list[Path]:
    """The weights of the brains in the directory: see `brain_students`."""
    files = (path for name in (STUDENT, LEGACY_STUDENT) for path in (directory / name, *directory.glob(f"*/{name}")))
    names = [path.relative_to(directory).as_posix() for path in files if path.is_file()]
    return [directory / name for name in brain_students(names)]


def _steps(directory: Path) -> list[Path]:
    """Upstream weights in a directory, oldest first; the published checkpoint counts as the latest."""
    files = [path for path in directory.iterdir() if hrm_step(path.name) is not None and path.is_file()]
    return sorted(files, key=lambda path: hrm_step(path.name) or 0)


def _weights_in(directory: Path) -> Path:
    students = _students(directory)
    if len(students) > 1:
        names = ", ".join(str(path.relative_to(directory)) for path in students)
        raise ModelNotFound(f"{directory} holds several brains ({names}). Give the path of one.")
    found = students or _steps(directory)
    if not found:
        raise ModelNotFound(
            f"{directory} holds neither {STUDENT} nor a {HRM_PUBLISHED} or step of upstream's trainer (step_1000)."
        )
    return found[-1]


def _home(weights: Path) -> Path:
    """The brain's main directory."""
    brain = nearby(weights.parent, BRAIN)
    return weights.absolute().parent if brain is None else brain.parent


def _name(weights: Path, home: Path) -> str:
    if weights.name in (STUDENT, LEGACY_STUDENT, HRM_PUBLISHED):
        return home.name
    return weights.stem if hrm_step(weights.name) is None else f"{home.name}-{weights.name}"


def _starter_file(path: Path) -> Path | None:
    if path.is_dir():
        path = path / _STARTER
    elif path.name == BRAIN_Q_HEAD:
        path = path.parent / _STARTER
    return path if path.name == _STARTER and path.is_file() else None


def _trusted(base: Path, file: Path) -> Path:
    if not base.resolve().is_relative_to(file.parent.resolve()):
        trouble = f"outside the brain's directory. Move it into {file.parent}"
    elif is_starter(base):
        trouble = "itself a starter. Name a model there"
    elif base.is_file() and (base.suffix in _PICKLES or hrm_step(base.name) is not None):
        trouble = "a pickle, which Ostro reads only when you name it yourself. Convert it to safetensors"
    else:
        return base
    raise BadCheckpoint(f"The base model that {file} names, {base}, is {trouble}, or serve the base model by its path.")


def _shapes(path: Path) -> Shapes:
    stored = _safetensors_shapes(path) if path.suffix == ".safetensors" else tensor_shapes(path)
    return Shapes(path, _stripped(path, stored))


def _with_rows(table: "torch.Tensor", rows: int) -> "torch.Tensor":
    """Truncated, or extended with rows as initialised before training; deterministic."""
    import torch

    held, width = table.shape
    if held >= rows:
        return table[:rows]
    generator = torch.Generator().manual_seed(0)
    added = torch.randn(rows - held, width, generator=generator) * width**-0.5
    return torch.cat([table, added.to(table.dtype)])


def _safetensors_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise ModelNotFound(f"There is no file {path}.") from None
    except SafetensorError as error:
        raise BadCheckpoint(f"{path} is damaged or not a safetensors file ({error}). Download it again.") from error
    except OSError as error:
        raise BadCheckpoint(f"Cannot read {path}: {error}.") from error


def _stripped(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    stripped = {_WRAPPERS.sub("", name): shape for name, shape in shapes.items()}
    if len(stripped) < len(shapes):
        raise BadCheckpoint(f"{path} holds the same tensors twice, under different prefixes. Export it again.")
    return stripped
