"""What llguidance reads, in text: literals and regexes in its dialect of Lark's notation, and its options for JSON. For
whoever writes grammars; knows nothing of what they describe.
"""

import json
import re
from collections.abc import Mapping

OPTIONS = "x-guidance"
"""Where llguidance looks for its own options, within a schema."""
SEPARATORS: Mapping[str, object] = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""JSON as models write it. With one way to write it, most of its punctuation is forced."""
WHITESPACE = r"( |\n{1,2}[ \t]{0,20})"
"""Between JSON's tokens, at most once: enough to print it prettily, and never an endless run."""

SpecialIds = Mapping[str, int]
"""The special tokens of a model, by their texts."""


def marked_text(text: str, special_ids: SpecialIds) -> str:
    """A text in Lark's notation in which the names of special tokens are those tokens. Empty for an empty text."""
    names = sorted((name for name in special_ids if name and name in text), key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text) if names else [text]
    return " ".join(f"<[{special_ids[part]}]>" if part in special_ids else text_literal(part) for part in parts if part)


def text_literal(text: str) -> str:
    """A text in Lark's notation."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def regex_literal(regex: str) -> str:
    """A regex between slashes, without line breaks."""
    escaped = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", regex, flags=re.DOTALL)
    return f"/{escaped}/".replace("\\\n", r"\n").replace("\n", r"\n")
