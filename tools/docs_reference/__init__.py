"""The parts of the docs that are made from the code: settings, the API's fields, what is refused.

Knows the classes and the pages they belong to; a test fails when a page is not what this makes. `make docs-generate`.
"""
