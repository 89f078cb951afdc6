"""Text on one side, token ids on the other: tokenizers, chat templates, incremental output, stop strings. No torch."""

from ostro.text.builtin_templates import BUILTIN_TEMPLATES
from ostro.text.chat import ChatTemplate, Message
from ostro.text.detokenizer import Detokenizer
from ostro.text.stops import StopMatcher, StopResult
from ostro.text.tokenizer import Tokenizer

__all__ = ["BUILTIN_TEMPLATES", "ChatTemplate", "Detokenizer", "Message", "StopMatcher", "StopResult", "Tokenizer"]
