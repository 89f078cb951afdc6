"""Which files of a listing are those of a Levanter checkpoint that are read. Knows names, and no formats.

FOLDER/metadata.json                 written last: without it the checkpoint is incomplete
FOLDER/model/…                       the weights; the optimizer's state, beside it, is left
FOLDER/manifest.ocdbt, FOLDER/d/…    or a database, whose files hold weights and optimizer's state mixed: all of them

FOLDER is the place itself, or step-N in it, of which the newest that is complete is taken.
"""

import re
from collections.abc import Collection

from ostro.errors import ModelNotFound

_ARRAYS = re.compile(r"(?P<folder>(?:step-(?P<step>\d+)/)?)(?:manifest\.ocdbt|model/transformer/.+)")
# metadata.json, manifest.json, and a tokenizer if there is one.
_BESIDE = r"[^/.][^/]*\.(?:json|jinja)|tokenizer\.model"


def levanter_files(names: Collection[str]) -> list[str] | None:
    """The files to fetch; None where there is no such checkpoint. ModelNotFound if none is complete."""
    folders = {match["folder"]: int(match["step"] or -1) for name in names if (match := _ARRAYS.fullmatch(name))}
    if not folders or "config.json" in names:
        return None
    complete = [folder for folder in folders if f"{folder}metadata.json" in names]
    if not complete:
        newest = max(folders, key=folders.__getitem__)
        raise ModelNotFound(
            f"The checkpoint is incomplete: it has no {newest}metadata.json, which Levanter writes last. "
            "Wait until it is written, or give another step."
        )
    folder = "" if "" in complete else max(complete, key=folders.__getitem__)
    data = r"manifest\.ocdbt|d/.+" if f"{folder}manifest.ocdbt" in names else r"model/.+"
    wanted = re.compile(f"{re.escape(folder)}(?:{_BESIDE}|{data})")
    return [name for name in names if wanted.fullmatch(name)]
