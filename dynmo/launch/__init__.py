"""Starts the processes of a run and supervises them: on this machine, under Slurm, under Ray.

`supervisor.py` watches processes of any `Starter`. One file each: the starters, what a rank does
with its launcher, and whose failure is told. Nothing here imports torch.
"""
