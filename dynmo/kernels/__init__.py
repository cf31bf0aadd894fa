"""Kernels that do only the remaining work. Tests have a plain reference of each."""
