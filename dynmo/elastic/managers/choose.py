"""Chooses the resource manager of a run, by its config and its launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from dynmo.elastic.manager import Manager
from dynmo.elastic.managers.command import CommandManager
from dynmo.elastic.managers.kubernetes import KubernetesManager
from dynmo.elastic.managers.launcher import LauncherManager
from dynmo.plan.options import Elastic


def make_manager(elastic: Elastic, environ: Mapping[str, str] = os.environ) -> Manager | None:
    """Makes the manager that `elastic.releaser` names.

    Args:
        elastic: Options of the run.
        environ: Environment variables. DYNMO_RENDEZVOUS names the folder of dynmo's launcher.

    Returns:
        The manager. None if no manager is told that ranks leave and join.

    Raises:
        ConfigError: A program or a package that it needs is missing.
    """
    if elastic.releaser == "command":
        commands = CommandManager(
            elastic.release_command, elastic.grow_command, elastic.join_timeout
        )
        commands.check()
        return commands
    if elastic.releaser == "kubernetes":
        job = KubernetesManager()
        job.check()
        return job
    folder = environ.get("DYNMO_RENDEZVOUS")
    return LauncherManager(Path(folder)) if elastic.releaser == "auto" and folder else None


def parks(elastic: Elastic) -> bool:
    """Returns True if ranks that leave wait to be called back.

    A pod of an indexed Job must not end by itself, or its index counts as done.
    """
    return elastic.park or elastic.releaser == "kubernetes"
