"""The training data: a corpus of bytes, and the batch of every step."""
