"""What classes say about their fields: the docstrings below them, which Python itself does not keep."""

import ast
import inspect
import textwrap

from pydantic import BaseModel


def notes(kind: type) -> dict[str, str]:
    """By field, in one line; a subclass's word counts before its parents'. A field that was made describes itself."""
    made = kind.model_fields if issubclass(kind, BaseModel) else {}
    found = {name: field.description for name, field in made.items() if field.description is not None}
    for each in reversed(kind.__mro__):
        if each.__module__.startswith("ostro.") and each.__name__ != "_SamplingFields":
            found |= _own_notes(each)
    return found


def _own_notes(kind: type) -> dict[str, str]:
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match text:
                case ast.Expr(value=ast.Constant(value=str(words))):
                    found[field.target.id] = " ".join(words.split()).removesuffix(".")
    return found
