"""Starts and supervises the processes of a run: here, under Slurm, under Ray.

`supervisor.py` watches processes of any `Starter`. Each starter has a file. `rank_side.py` is the
rank's side, and `failure.py` finds the cause of a failure. Nothing here imports torch.
"""
