"""Reads a Dockerfile: stages and their instructions. Knows the grammar that ours uses; runs nothing."""

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

_INSTRUCTION = re.compile(r"(?P<name>[A-Z]+)\s+(?P<value>.*)", re.DOTALL)
_FROM = re.compile(r"(?P<image>\S+)\s+AS\s+(?P<name>\S+)")


@dataclass(frozen=True)
class Instruction:
    name: str
    value: str

    @property
    def command(self) -> str:
        """The shell command of a RUN, without the flags before it."""
        return re.sub(r"^(--\S+\s+)+", "", self.value)

    @property
    def words(self) -> list[str]:
        """Words of an instruction in exec form, such as ENTRYPOINT ["ostro"], without the flags before it."""
        listed = json.loads(self.value[self.value.index("[") :])
        assert isinstance(listed, list)
        return [str(each) for each in listed]

    @property
    def pairs(self) -> dict[str, str]:
        """Names and values of an ENV, LABEL or ARG."""
        return {key: value for key, _, value in (word.partition("=") for word in shlex.split(self.value))}


@dataclass
class Stage:
    name: str
    base: str
    instructions: list[Instruction] = field(default_factory=list)

    def all(self, name: str) -> list[Instruction]:
        return [each for each in self.instructions if each.name == name]


@dataclass
class Dockerfile:
    arguments: dict[str, str]
    """ARGs before the first stage."""
    stages: dict[str, Stage]
    """Stages in order; the last one is built by default."""

    def chain(self, target: str) -> list[Stage]:
        """The stages whose layers the target has, lowest first."""
        stage = self.stages[target]
        return [*(self.chain(stage.base) if stage.base in self.stages else []), stage]

    def instructions(self, target: str) -> list[Instruction]:
        return [each for stage in self.chain(target) for each in stage.instructions]

    def last(self, target: str, name: str) -> Instruction:
        return [each for each in self.instructions(target) if each.name == name][-1]

    def environment(self, target: str) -> dict[str, str]:
        """Variables that its ENV lines set; `$PATH` is not expanded."""
        return {
            key: value for each in self.instructions(target) if each.name == "ENV" for key, value in each.pairs.items()
        }


def read_dockerfile(path: Path) -> Dockerfile:
    read = Dockerfile({}, {})
    stage: Stage | None = None
    for line in _logical_lines(path.read_text(encoding="utf-8")):
        match = _INSTRUCTION.fullmatch(line)
        assert match is not None, f"no instruction: {line}"
        instruction = Instruction(match["name"], match["value"].strip())
        if instruction.name == "FROM":
            named = _FROM.fullmatch(instruction.value)
            assert named is not None, f"a stage without a name: {line}"
            stage = read.stages[named["name"]] = Stage(named["name"], named["image"])
        elif stage is None:
            read.arguments |= instruction.pairs
        else:
            stage.instructions.append(instruction)
    return read


def _logical_lines(text: str) -> list[str]:
    """Instructions with continuation lines joined and comments removed, also those between such lines."""
    kept = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return re.sub(r"\\\n\s*", "", "\n".join(kept)).splitlines()
