"""What is trained on: a corpus of bytes, and the batch of every step as a pure function of (seed,
step)."""
