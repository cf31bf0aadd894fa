"""Data: reading, order, packing and exact resume. Knows no ranks."""

IGNORED = -100
"""The label that no loss counts, as in torch and transformers."""
