"""Schedules that are found by search: zero bubble, V shapes, the exact solver. No torch."""
