"""Checks the versions of Python and of packages against those that dynmo requires."""

from __future__ import annotations

import platform
from collections.abc import Collection, Iterator, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from dynmo.config import Config
from dynmo.doctor.finding import Finding, State
from dynmo.errors import first_line, how_to_install

PACKAGE = "dynmo-train"
_COMPILED = ("numpy", "numba", "torch")
_USES = {
    "dashboard": "dynmo dashboard",
    "data": "parquet:PATH and hf:NAME as data.source",
    "exact": "dynmo schedule --exact",
    "hf": 'model.kind = "hf"',
    "kubernetes": 'elastic.releaser = "kubernetes"',
    "lora": "model.lora",
    "metrics": "metrics.to = tensorboard or wandb",
    "otel": "metrics.to = opentelemetry",
    "ray": "dynmo train --launcher ray",
    "slices": "parallel.slices",
}


def packages_of(config: Config) -> set[str]:
    """Returns the optional packages that a run of this config loads."""
    sources = {source.partition(":")[0] for source in config.data.sources}
    uses = {
        "cuda-core": config.parallel.slices,
        "datasets": not sources.isdisjoint({"hf", "parquet"}),
        "kubernetes": config.elastic.releaser == "kubernetes",
        "opentelemetry-sdk": "opentelemetry" in config.metrics.to,
        "peft": config.model.lora is not None,
        "tensorboard": "tensorboard" in config.metrics.to,
        "transformers": config.model.kind == "hf",
        "wandb": "wandb" in config.metrics.to,
    }
    return {name for name, is_used in uses.items() if is_used}


def check_packages(used: Collection[str]) -> Iterator[Finding]:
    """Checks what dynmo always needs, and each extra.

    Args:
        used: Optional packages without which the run would fail.
    """
    try:
        python = metadata(PACKAGE)["Requires-Python"]
        needed = [Requirement(text) for text in requires(PACKAGE) or ()]
        extras = metadata(PACKAGE).get_all("Provides-Extra") or []
    except PackageNotFoundError:
        seen = f"{PACKAGE} is not installed, so the versions that it requires are unknown"
        yield Finding("packages", State.warning, seen, "install dynmo with pip")
        return
    if platform.python_version() not in SpecifierSet(python):
        seen = f"Python {platform.python_version()}, and dynmo requires {python}"
        yield Finding("packages", State.problem, seen, "make an environment with another Python")
    always = [each for each in needed if _is_of("", each)]
    yield _of_list("packages", always, State.problem)
    for extra in extras:
        if extra in _USES:
            of_extra = [each for each in needed if _is_of(extra, each) and each not in always]
            is_used = any(each.name in used and _fault(each) for each in of_extra)
            state = State.problem if is_used else State.warning
            yield _of_list(f"extra {extra}", of_extra, state, _USES[extra])


def _is_of(extra: str, requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _fault(requirement: Requirement) -> str | None:
    """Returns why a requirement is not met, or None."""
    name = requirement.name
    try:
        installed = version(name)
    except PackageNotFoundError:
        return f"{name} is not installed"
    if not requirement.specifier.contains(installed, prereleases=True):
        return f"{name} is {installed}, and dynmo requires {requirement.specifier}"
    if name in _COMPILED:  # an installation may lack a library of the system
        try:
            import_module(name)
        except (ImportError, OSError) as error:
            return f"{name} {installed} cannot be loaded: {first_line(error)}"
    return None


def _of_list(
    check: str, requirements: Sequence[Requirement], state: State, use: str = ""
) -> Finding:
    faults = {each: fault for each in requirements if (fault := _fault(each))}
    sound = [each.name for each in requirements if each not in faults]
    figures = {name: version(name) for name in sound}
    if not faults:
        python = "" if use else f"Python {platform.python_version()}, "
        seen = python + ", ".join(f"{name} {installed}" for name, installed in figures.items())
        return Finding(check, State.ok, seen, figures=figures)
    seen = "; ".join(faults.values()) + (f" (for {use})" if use else "")
    remedy = how_to_install(*(f"{each.name}{each.specifier}" for each in faults))
    return Finding(check, state, seen, remedy, figures)
