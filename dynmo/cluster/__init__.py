"""Resource managers, which give ranks to a run and take them back.

`releaser.py` has the protocol that rank 0 uses while it trains. Each manager has a file: the
launcher's desk (this machine, Slurm, Ray), Kubernetes, a command of the user's own. Nothing here
imports torch.
"""
