r"""Regexes that come from files, matched in time linear in the text. Knows no files.

Python's own engine backtracks: ten characters such as `(\w+)+x` keep it busy for years with a tensor's name. pydantic
has Rust's, which does not, and which limits the size of what it compiles.
"""

from collections.abc import Callable


def linear_matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a text matches as a whole. Raises ValueError for a pattern that is malformed, too large, or needs
    backtracking, as references to groups and look-ahead do.
    """
    from pydantic_core import SchemaError, SchemaValidator, core_schema

    try:
        schema = core_schema.str_schema(pattern=rf"^(?s-m:{pattern})$", regex_engine="rust-regex", strict=True)
        return SchemaValidator(schema).isinstance_python
    except SchemaError as error:
        raise ValueError(f"{pattern!r} is not a pattern that can be matched in linear time") from error
