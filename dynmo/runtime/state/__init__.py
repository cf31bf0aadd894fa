"""The layers that this rank holds, their migration and their checkpoints."""
