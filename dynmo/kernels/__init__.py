"""Kernels that do only the remaining work.

Each has a plain reference in the tests.
"""
