"""Schedules found by search: zero bubble, V shapes, the exact solver.

This folder does not need torch.
"""
