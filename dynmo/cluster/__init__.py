"""Resource managers: who gives a run its ranks, takes them back, and gives more.

`releaser.py` has the protocol that rank 0 uses while it trains. One file each: the launcher's desk
(this machine, Slurm, Ray), Kubernetes, a command of the user's own. Nothing here imports torch.
"""
