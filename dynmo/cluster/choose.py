"""Chooses the resource manager of a run, by its config and its launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from dynmo.cluster.command import CommandReleaser
from dynmo.cluster.desk import LauncherDesk
from dynmo.cluster.kubernetes import KubernetesReleaser
from dynmo.cluster.options import Elastic
from dynmo.cluster.releaser import Releaser


def make_releaser(elastic: Elastic, environ: Mapping[str, str] = os.environ) -> Releaser | None:
    """Makes the releaser that `elastic.releaser` names.

    Args:
        elastic: Options of the run.
        environ: Environment variables. They name the launcher's folder, if dynmo's launcher
            started this process.

    Returns:
        The releaser. None if no manager is told that ranks leave and join.

    Raises:
        ConfigError: A program or a package that it needs is missing.
    """
    if elastic.releaser == "command":
        commands = CommandReleaser(
            elastic.release_command, elastic.grow_command, elastic.join_timeout
        )
        commands.check()
        return commands
    if elastic.releaser == "kubernetes":
        job = KubernetesReleaser()
        job.check()
        return job
    folder = environ.get("DYNMO_RENDEZVOUS")
    return LauncherDesk(Path(folder)) if elastic.releaser == "auto" and folder else None


def parks(elastic: Elastic) -> bool:
    """Returns True if ranks that leave wait to be called back.

    A pod of an indexed Job must not end by itself, or its index counts as done.

    Args:
        elastic: Options of the run.
    """
    return elastic.park or elastic.releaser == "kubernetes"
