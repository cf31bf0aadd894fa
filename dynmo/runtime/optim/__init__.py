"""Optimizer, ZeRO-1, gradient reduction, tied weights and loss scale."""
