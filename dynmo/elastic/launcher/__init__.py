"""The launcher of a run: starts the processes of ranks and supervises them.

`supervisor.py` watches the processes of any `Starter`. `rank_side.py` is the rank's side.
`failure.py` finds the cause of a failure. Nothing here imports torch.
"""
