"""Kernels that do only the work that is left, each with a plain reference in the tests."""
