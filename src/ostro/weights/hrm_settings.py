"""Builds an HRM's config from its tensors' shapes and the files beside its weights.

Sizes come from the shapes. Heads and cycles, which shapes do not reveal, come from the first of: the operator's
settings, the file named there, the files beside the weights. Nothing is guessed: a contradiction with the shapes is an
error here, and a missing value is an error when the config is read.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ostro.errors import BadCheckpoint
from ostro.formats.json_file import read_json_object
from ostro.formats.yaml_file import read_yaml, shown
from ostro.sources.files import BRAIN, BRAIN_METADATA, HRM_CONFIG, LEGACY_STUDENT, STUDENT

ARCHITECTURE, MODEL_TYPE = "HrmActV1", "hrm_act_v1"
_BRAIN_TYPE = "actv1"
_LAYER = re.compile(r"inner\.([HL])_level\.layers\.(\d+)\.")
_EXPERT = re.compile(r"inner\.L_level\.layers\.0\.mlp\.moe\.experts\.(\d+)\.w1\.weight")


@dataclass(frozen=True, slots=True)
class SettingTables:
    """Tables in order of precedence, each with the name used for it in errors; keys in lower case."""

    files: str | None
    tables: tuple[tuple[str, Mapping[str, object]], ...]
    dialect: str | None

    def below(self, settings: "HrmSettings") -> "SettingTables":
        """With the operator's settings taking precedence."""
        flags = {key: value for key, value in settings.values.items() if value is not None}
        above = (("The settings", lower_keys(flags)),) if flags else ()
        file = None if settings.file is None else read_settings_file(settings.file)
        if file is None:
            return replace(self, tables=(*above, *self.tables))
        files = file.files if self.files is None else f"{file.files} or {self.files}"
        return SettingTables(files, (*above, *file.tables, *self.tables), file.dialect or self.dialect)

    def find(self, *keys: str) -> tuple[str, object] | None:
        """The first non-null value among the tables, and where it was found."""
        for place, table in self.tables:
            for key in keys:
                if table.get(key.lower()) is not None:
                    return f"{place}: {key!r}", table[key.lower()]
        return None

    def integer(self, *keys: str) -> int | None:
        found = self.find(*keys)
        if found is None:
            return None
        where, value = found
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 63:
            raise BadCheckpoint(f"{where} must be an integer above 0, got {shown(value)}.")
        return value


@dataclass(frozen=True, slots=True)
class HrmSettings:
    """The operator's settings for an HRM: a file, and single values under the names used in such files."""

    file: Path | None
    values: Mapping[str, int | str | None]


def read_settings_files(weights: Path) -> SettingTables:
    """Everything the files near the weights say. The upstream trainer's config must be in the same directory."""
    brain, metadata = nearby(weights.parent, BRAIN), nearby(weights.parent, BRAIN_METADATA)
    upstream = weights.absolute().parent / HRM_CONFIG
    if upstream.is_file() and (brain is None or brain.parent != upstream.parent):
        return read_settings_file(upstream)
    tables: list[tuple[str, Mapping[str, object]]] = []
    if brain is not None:
        tables += _tables(brain, read_json_object(brain), "arch", "last_session.config")
    if metadata is not None:
        tables += _tables(metadata, read_json_object(metadata), "arch", "config")
    files = " or ".join(str(path) for path in (brain, metadata) if path is not None)
    is_brain = brain is not None or weights.name in (STUDENT, LEGACY_STUDENT)
    return SettingTables(files or None, tuple(tables), "aios" if is_brain else None)


def read_settings_file(path: Path) -> SettingTables:
    """The contents of a file named by the operator: a brain.json, an all_config.yaml, or a custom one."""
    if path.suffix == ".json":
        tables = _tables(path, read_json_object(path), "arch", "last_session.config", "config")
    else:
        # As in the upstream trainer's file, where `arch` is nested in other settings.
        outer, *inner = _tables(path, _read_yaml(path), "arch")
        tables = [*inner, outer]
    dialect = {BRAIN: "aios", HRM_CONFIG: "upstream"}.get(path.name)
    return SettingTables(str(path), tuple(tables), dialect or _dialect_of_type(tables))


def _dialect_of_type(tables: Sequence[tuple[str, Mapping[str, object]]]) -> str | None:
    """AI-OS's, if it is a brain.json under another name."""
    return "aios" if any(table.get("type") == _BRAIN_TYPE for _, table in tables) else None


def _tables(path: Path, whole: Mapping[str, object], *inner: str) -> list[tuple[str, Mapping[str, object]]]:
    tables: list[tuple[str, Mapping[str, object]]] = [(str(path), lower_keys(whole))]
    for dotted in inner:
        value: object = whole
        for part in dotted.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None and not isinstance(value, Mapping):
            raise BadCheckpoint(f"{path}: {dotted!r} must be an object, got {shown(value)}.")
        if value is not None:
            tables.append((f"{path}, {dotted}", lower_keys(value)))
    return tables


def nearby(directory: Path, file: str) -> Path | None:
    """Looks in the directory and its two nearest ancestors."""
    directory = directory.absolute()
    places = (directory, *directory.parents[:2])
    return next((place / file for place in places if (place / file).is_file()), None)


def lower_keys(table: Mapping[str, object]) -> dict[str, object]:
    return {key.lower(): value for key, value in table.items() if isinstance(key, str)}


def is_upstream(directory: Path) -> bool:
    path = directory / HRM_CONFIG
    try:
        arch = _read_yaml(path).get("arch") if path.is_file() else None
    except BadCheckpoint:
        return False
    return isinstance(arch, Mapping) and "h_cycles" in lower_keys(arch)


def _read_yaml(path: Path) -> dict[str, object]:
    value = read_yaml(path)
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{path} should hold a table but holds a {type(value).__name__}.")
    return value


@dataclass(frozen=True, slots=True)
class Shapes:
    path: Path
    of: Mapping[str, tuple[int, ...]]

    def rows(self, name: str) -> int:
        return self.matrix(name)[0]

    def matrix(self, name: str) -> tuple[int, int]:
        shape = self.of.get(name)
        if shape is None:
            raise BadCheckpoint(f"{self.path} holds no tensor {name!r}, so it is not an HRM ACT-v1 checkpoint.")
        if len(shape) != 2 or 0 in shape:
            raise BadCheckpoint(f"{self.path}: tensor {name!r} has shape {shape}, which is not a matrix.")
        return shape[0], shape[1]

    def layers(self, level: str) -> int:
        found = [_LAYER.match(name) for name in self.of]
        numbers = {int(match[2]) for match in found if match is not None and match[1] == level}
        if numbers != set(range(len(numbers))) or not numbers:
            raise BadCheckpoint(
                f"{self.path} holds layers {sorted(numbers)} of level {level}, which is not a full stack."
            )
        return len(numbers)

    def experts(self) -> int:
        return sum(_EXPERT.fullmatch(name) is not None for name in self.of)


def hrm_config(shapes: Shapes, stated: SettingTables) -> dict[str, object]:
    vocab, hidden = shapes.matrix("inner.embed_tokens.embedding_weight")
    experts = shapes.experts()
    mlp = "inner.L_level.layers.0.mlp"
    inner = shapes.rows(f"{mlp}.moe.experts.0.w1.weight" if experts else f"{mlp}.gate_up_proj.weight")
    h_layers, l_layers = shapes.layers("H"), shapes.layers("L")
    _agree(stated, hidden, "hidden_size")
    _agree(stated, h_layers, "H_layers")
    _agree(stated, l_layers, "L_layers")
    _agree_about_experts(stated, experts)
    config: dict[str, object] = {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "tie_word_embeddings": False,
        "settings_files": stated.files,
        "vocab_size": _vocabulary(stated, vocab),
        "hidden_size": hidden,
        "intermediate_size": inner if experts else inner // 2,
        "num_heads": stated.integer("num_heads", "heads", "num_attention_heads"),
        "H_cycles": stated.integer("H_cycles"),
        "L_cycles": stated.integer("L_cycles"),
        "H_layers": h_layers,
        "L_layers": l_layers,
        "num_experts": experts or None,
        "num_experts_per_tok": stated.integer("num_experts_per_tok", "experts_per_token") if experts else None,
        "halt_max_steps": stated.integer("halt_max_steps"),
        **_positions(shapes, stated, hidden),
    }
    for key in ("rms_norm_eps", "rope_theta", "dialect"):
        found = stated.find(key)
        if found is not None and not _is_plain(found[1]):
            raise BadCheckpoint(f"{found[0]} must be a number or a text, got {shown(found[1])}.")
        config[key] = found[1] if found is not None else None
    config["dialect"] = config["dialect"] or stated.dialect
    return {key: value for key, value in config.items() if value is not None}


def _is_plain(value: object) -> bool:
    """Whether it is a string, or a number short enough to show."""
    return isinstance(value, str | float) or (isinstance(value, int) and abs(value) < 1 << 63)


def _positions(shapes: Shapes, stated: SettingTables, hidden: int) -> dict[str, object]:
    """Position encoding, number of positions, and how many of them the puzzle embedding takes."""
    table, puzzles = "inner.embed_pos.embedding_weight", "inner.puzzle_emb.weights"
    found = stated.find("pos_encodings", "pos_encoding")
    kind = "learned" if table in shapes.of else "rope"
    if found is not None and found[1] != kind:
        has = "a table of positions" if kind == "learned" else "no table of positions"
        raise BadCheckpoint(
            f"{found[0]} is {shown(found[1])}, but {shapes.path} holds {has}. They may not belong together."
        )
    config: dict[str, object] = {"pos_encodings": kind}
    places = 0
    if puzzles in shapes.of:
        config["num_puzzle_identifiers"], size = shapes.matrix(puzzles)
        config["puzzle_emb_ndim"] = size
        places = -(-size // hidden)
    length = stated.integer("seq_len", "max_seq_len", "max_position_embeddings")
    if kind == "learned":
        rows = shapes.rows(table) - places
        if length is not None and length != rows:
            _agree(stated, rows, "seq_len", "max_seq_len", "max_position_embeddings")
        length = rows
    config["seq_len"] = length
    return config


def _agree(stated: SettingTables, shaped: int, *keys: str) -> None:
    value = stated.integer(*keys)
    if value is not None and value != shaped:
        found = stated.find(*keys)
        assert found is not None
        raise BadCheckpoint(
            f"{found[0]} is {value}, but the tensors' shapes say {shaped}. They may not belong together."
        )


def _vocabulary(stated: SettingTables, rows: int) -> int:
    """AI-OS's rule: a brain's stated size wins, and tables are truncated or extended to it."""
    if stated.dialect != "aios":
        _agree(stated, rows, "vocab_size")
    return stated.integer("vocab_size") or rows


def _agree_about_experts(stated: SettingTables, experts: int) -> None:
    found = stated.find("use_moe")
    if found is not None and found[1] is not bool(experts):
        has = f"{experts} experts in a layer" if experts else "no experts"
        raise BadCheckpoint(
            f"{found[0]} is {shown(found[1])}, but the weights have {has}. They may not belong together."
        )
    if experts:
        _agree(stated, experts, "num_experts")
