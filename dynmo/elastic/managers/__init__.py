"""Resource managers. Each starts ranks, gives them back, and is watched (`elastic/manager.py`).

rank 0's managers       command, kubernetes; or the launcher, which did start the ranks
the launcher's starters local, slurm, ray
"""

from __future__ import annotations

from dynmo.elastic.manager import Manager
from dynmo.elastic.managers.command import CommandManager
from dynmo.elastic.managers.kubernetes import KubernetesManager
from dynmo.plan.options import Elastic


def make_manager(elastic: Elastic, launcher: Manager | None = None) -> Manager | None:
    """Makes the manager that `elastic.releaser` names.

    Args:
        launcher: dynmo's launcher, if it started the ranks.

    Returns:
        The manager. None if no manager is told that ranks leave and join.

    Raises:
        ConfigError: A program or a package that it needs is missing.
    """
    if elastic.releaser == "command":
        manager = CommandManager(
            elastic.release_command, elastic.grow_command, elastic.join_timeout
        )
    elif elastic.releaser == "kubernetes":
        manager = KubernetesManager()
    else:
        return launcher if elastic.releaser == "auto" else None
    manager.check()
    return manager


def parks(elastic: Elastic) -> bool:
    """Returns True if ranks that leave wait to be called back.

    A pod of an indexed Job must not end by itself, or its index counts as done.
    """
    return elastic.park or elastic.releaser == "kubernetes"
