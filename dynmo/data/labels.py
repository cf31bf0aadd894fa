"""Labels of tokens."""

IGNORED = -100
"""The label that no loss counts, as in torch and transformers."""
