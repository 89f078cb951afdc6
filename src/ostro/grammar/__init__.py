"""Structured outputs: schemas, regexes and grammars, and the tokens they allow. Only this package knows llguidance."""
