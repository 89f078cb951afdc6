"""Text for llguidance: literals and regexes in its dialect of Lark's notation, and its options for JSON. For code that
writes grammars; does not know what they describe.
"""

import json
import re
from collections.abc import Mapping

OPTIONS = "x-guidance"
"""The key of llguidance's own options in a schema."""
SEPARATORS: Mapping[str, object] = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""JSON as models usually write it. With only one way to write it, most of the punctuation is forced."""
WHITESPACE = r"( |\n{1,2}[ \t]{0,20})"
"""Whitespace between JSON's tokens, at most once: enough for pretty-printing, without endless runs."""

SpecialIds = Mapping[str, int]
"""The ids of a model's special tokens, by their texts."""


def marked_text(text: str, special_ids: SpecialIds) -> str:
    """A text in Lark's notation, with special tokens in place of their names. Empty for an empty text."""
    names = sorted((name for name in special_ids if name and name in text), key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text) if names else [text]
    return " ".join(f"<[{special_ids[part]}]>" if part in special_ids else text_literal(part) for part in parts if part)


def text_literal(text: str) -> str:
    """The text as a string literal in Lark's notation."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def regex_literal(regex: str) -> str:
    """The regex as a literal in Lark's notation: between slashes, without line breaks."""
    escaped = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", regex, flags=re.DOTALL)
    return f"/{escaped}/".replace("\\\n", r"\n").replace("\n", r"\n")
