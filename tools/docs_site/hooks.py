"""Lets the docs' pages point at files of the repository: they are copied into the site, and the links follow them.

Pages that have moved leave a redirect behind. Knows links that leave docs/; whether their targets exist is for the
tests of links.
"""

import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_PLACE = "repository"
# Pages that other sites may link to, and what took their place.
MOVED = {
    "api.html": "api/index.html",
    "coming-from/llama-cpp.html": "coming-from/index.html#llamacpp",
    "coming-from/ollama.html": "coming-from/index.html#ollama",
    "coming-from/tgi.html": "coming-from/index.html#text-generation-inference",
    "coming-from/vllm.html": "coming-from/index.html#vllm",
    "compare.html": "evaluation.html#comparing-servers",
    "embeddings.html": "api/embeddings.html",
    "glossary.html": "architecture.html#words",
    "handing-over.html": "kv-tiers.html",
    "native-api.html": "api/native.html",
    "openai-clients.html": "client.html",
    "quantized-checkpoints.html": "models.html#quantised-checkpoints",
    "quick-start.html": "index.html",
    "responses-and-messages.html": "api/responses.html",
    "triton.html": "deployment.html#triton-inference-server",
}
_REDIRECT = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={0}"><a href="{0}">Moved</a>\n'
)
_OUTWARD = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#\s]*)(?:#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page in files.documentation_pages():
        for _, target in _OUTWARD.findall(page.content_string):
            path = _in_repository(page.src_uri, target)
            source = Path(config.docs_dir).parent / path
            uri = f"{_PLACE}/{path}"
            if path and source.is_file() and source.suffix != ".md" and files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    upward = "../" * (len(PurePosixPath(page.file.src_uri).parts) - 1)

    def follow(found: re.Match[str]) -> str:
        text, target = found.groups()
        path = _in_repository(page.file.src_uri, target)
        if not path:
            return found[0]
        if files.get_file_from_path(f"{_PLACE}/{path}") is not None:
            return f"[{text}]({upward}{_PLACE}/{path})"
        # The front page stands for the README; a directory has nothing to show here.
        return f"[{text}]({upward}index.md)" if path == "README.md" else text

    return _OUTWARD.sub(follow, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    for old, new in MOVED.items():
        page = Path(config.site_dir, old)
        page.parent.mkdir(exist_ok=True)
        page.write_text(_REDIRECT.format("../" * old.count("/") + new), encoding="utf-8")


def _in_repository(page: str, target: str) -> str:
    """The target's path from the repository's root; empty if it is within docs/."""
    parts = ["docs", *PurePosixPath(page).parent.parts]
    for part in PurePosixPath(target).parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "" if parts[:1] == ["docs"] else "/".join(parts)
