"""Parts of a tokenizer.json, as their authors or an attacker may write them."""

import base64
import struct
from typing import Any

Part = dict[str, Any]


def replace(pattern: str, content: str, kind: str = "String") -> Part:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def sequence(*steps: Part, of: str = "normalizers") -> Part:
    return {"type": "Sequence", of: list(steps)}


def pre_tokenizers_of(*steps: Part) -> Part:
    return sequence(*steps, of="pretokenizers")


METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
ISOLATE = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}


def charsmap(strings: bytes, *, key: bytes = b"z", at: int = 0) -> str:
    """A map of one key: a double array whose nodes are 256 units apart."""
    units = [0] * 256 * (len(key) + 2)
    base = 256
    units[0] = base << 10
    for number, byte in enumerate(key):
        node, following = base ^ byte, base + 256
        is_last = number == len(key) - 1
        units[node] = byte | is_last << 8 | (node ^ following) << 10
        base = following
    units[base] = at | 1 << 31
    data = struct.pack("<I", 4 * len(units)) + struct.pack(f"<{len(units)}I", *units) + strings
    return base64.b64encode(data).decode()


def precompiled(strings: bytes, **how: Any) -> Part:
    return {"type": "Precompiled", "precompiled_charsmap": charsmap(strings, **how)}


def template(*pieces: str) -> list[Part]:
    """A post-processor's: A and B are texts, all others special tokens."""
    return [{"Sequence" if each in "AB" else "SpecialToken": {"id": each, "type_id": 0}} for each in pieces]


def processing(single: list[Part], pair: list[Part], ids: list[int]) -> Part:
    special = {"<s>": {"id": "<s>", "ids": ids, "tokens": ["<s>"] * len(ids)}}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
