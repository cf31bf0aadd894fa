"""Executor, programs, profiler, the end of a step and post-validation."""
