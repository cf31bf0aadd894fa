"""The documents, and the generators of their tables, figures and drawings."""
