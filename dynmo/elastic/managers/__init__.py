"""Resource managers, which start the processes of ranks and take their resources back.

`manager.py` has the two protocols. `Manager` is what rank 0 uses while it trains: the launcher
that started the run, Kubernetes, or a command of the user's own. `Starter` is what the launcher
uses: this machine, Slurm or Ray. Nothing here imports torch.
"""
