"""Generators of the documents. `python -m docs.tools` writes all generated parts."""
