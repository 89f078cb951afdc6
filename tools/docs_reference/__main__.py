"""Writes the generated parts of all pages: `python -m docs_reference`."""

from docs_reference.pages import ROOT, pages

for path, text in pages().items():
    if path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
