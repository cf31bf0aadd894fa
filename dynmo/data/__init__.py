"""The training data: a corpus of bytes, and the batch of every step.

A batch is a pure function of (seed, step).
"""
