"""How a model scores the relevance of one text to another: a classifier's output, or a language model's answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ostro.errors import BadCheckpoint, UnsupportedModel
from ostro.formats.json_file import read_json_object
from ostro.models.config import MOST_VOCAB, ConfigReader
from ostro.models.registry import describe_encoder
from ostro.weights.pooling import module_config, modules_of, read_prompts

_ACTIVATIONS = {"Sigmoid": True, "Identity": False}


@dataclass(frozen=True, slots=True)
class Ranking:
    """How a classifier's output becomes a relevance score, as with sentence-transformers' CrossEncoder."""

    num_labels: int
    sigmoid: bool
    """Whether the output is mapped to a number from 0 to 1."""


def read_ranking(config: Mapping[str, object]) -> Ranking | None:
    """From a config.json; None if the model is no classifier."""
    described = describe_encoder(config)
    if described is None or described.head is None:
        return None
    return Ranking(described.head.num_labels, uses_sigmoid(config))


def uses_sigmoid(config: Mapping[str, object], directory: Path | None = None) -> bool:
    """Whether the activation named in a config.json, or in the directory's newer file, is the sigmoid. The sigmoid is
    the default.
    """
    reader = ConfigReader(config)
    own = ConfigReader(reader.table("sentence_transformers") or {}, "config.json's 'sentence_transformers'")
    # Older files have it at top level.
    named = own.text("activation_fn", reader.text("sbert_ce_default_activation_function", "Sigmoid"))
    newer = None if directory is None else directory / "config_sentence_transformers.json"
    if newer is not None and newer.is_file():
        named = ConfigReader(read_json_object(newer), str(newer)).text("activation_fn", named)
    name = named.rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(f"The activation {named!r} of a cross-encoder is not known; known: Sigmoid, Identity.")
    return _ACTIVATIONS[name]


_CHAIN = ["Transformer", "LogitScore"]
_OF_PAIRS, _LOGITS = "text-generation", "causal_logits"
_GENERATION_PROMPT = "add_generation_prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """How a language model that judges pairs of texts is asked, according to its sentence-transformers files.

        modules.json                        Transformer, LogitScore
        N_LogitScore/config.json            the tokens of a yes and of a no
        sentence_bert_config.json           what the chat template is given
        config_sentence_transformers.json   the instruction, and what becomes of the score

    The template shows messages in the roles `query` and `document`, after the instruction as a `system` message.
    """

    yes: int
    """The tokens of both answers: the score is the logit of `yes` minus that of `no`."""
    no: int
    sigmoid: bool
    """Whether the score is mapped to a number from 0 to 1: the share of `yes` among the two."""
    instruction: str = ""
    add_generation_prompt: bool = False
    variables: Mapping[str, object] = field(default_factory=dict)
    """Additional template variables."""

    def messages(self, query: str, document: str) -> list[Mapping[str, object]]:
        texts = {"system": self.instruction, "query": query, "document": document}
        return [{"role": role, "content": text} for role, text in texts.items() if role != "system" or text]


def read_judge(directory: Path, config: Mapping[str, object]) -> Judge | None:
    """None if the model's files name no LogitScore. `config` is its config.json."""
    modules = modules_of(directory)
    kinds = [kind for kind, _ in modules]
    if "LogitScore" not in kinds:
        return None
    if kinds != _CHAIN:
        raise UnsupportedModel(
            f"{directory / 'modules.json'} lists {', '.join(kinds)}; Ostro runs {' and '.join(_CHAIN)}, in this order."
        )
    scoring = module_config(directory, dict(modules)["LogitScore"])
    if scoring.get("false_token_id") is None:
        raise UnsupportedModel(
            f"{scoring.source} names no 'false_token_id'. Ostro compares the logits of two tokens; load a model that "
            "names both."
        )
    if (read := scoring.text("module_input_name", _LOGITS)) != _LOGITS:
        raise UnsupportedModel(f"{scoring.source}: 'module_input_name' is {read!r}; Ostro knows {_LOGITS}.")
    vocabulary = ConfigReader(config).integer("vocab_size", most=MOST_VOCAB)
    yes, no = (_token(scoring, name, vocabulary) for name in ("true_token_id", "false_token_id"))
    prompts = read_prompts(directory)
    asked = _transformer_settings(directory)
    variables = dict(ConfigReader(asked.table("processing_kwargs") or {}, asked.source).table("chat_template") or {})
    # Read by sentence-transformers alone, for texts that it shortens.
    variables.pop("restore_suffix", None)
    generation = ConfigReader(variables, asked.source).flag(_GENERATION_PROMPT, False)
    return Judge(
        yes=yes,
        no=no,
        sigmoid=uses_sigmoid(config, directory),
        instruction=prompts.named(None),
        add_generation_prompt=generation,
        variables={name: value for name, value in variables.items() if name != _GENERATION_PROMPT},
    )


def _token(config: ConfigReader, name: str, vocabulary: int) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocabulary:
        raise BadCheckpoint(f"{config.source}: {name!r} must be a token from 0 to {vocabulary - 1}. Download it again.")
    return value


def _transformer_settings(directory: Path) -> ConfigReader:
    path = directory / "sentence_bert_config.json"
    settings = ConfigReader(read_json_object(path) if path.is_file() else {}, str(path))
    if (task := settings.text("transformer_task", _OF_PAIRS)) != _OF_PAIRS:
        raise UnsupportedModel(f"{path}: 'transformer_task' is {task!r}; a LogitScore needs {_OF_PAIRS}.")
    if (modalities := settings.table("modality_config")) is not None:
        messages = ConfigReader(modalities, settings.source).table("message")
        if messages is None or ConfigReader(messages, settings.source).text("format", "flat") != "flat":
            raise UnsupportedModel(f"{path}: 'modality_config' has no 'message' of format 'flat', by which Ostro asks.")
    return settings
