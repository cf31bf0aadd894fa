"""The random test: many configurations, each held bit for bit against one rank.

A case draws model, schedule, mesh, balancer, dynamic cases, precision and much else (`draws.py`).
Some are stopped and resumed elsewhere. Losses, norms, held-out losses, what cases changed, weights
and buffers must be those of the same training on one rank. A model of one's own must also agree
with a plain PyTorch loop. Every failure is printed with the TOML files that replay it.
"""
