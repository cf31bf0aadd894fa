"""Checks of values that must fit together.

Each problem is one line that names its keys.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from dynmo.cases import CASES
from dynmo.config.sections import Config
from dynmo.pipeline.option_checks import problems
from dynmo.plan.partition import nearest_divisors

Rule = Callable[[Config], Iterator[str]]


def first_problem(config: Config) -> str | None:
    """Finds the first reason why the values of a config do not fit together."""
    # A rule may rely on those before it.
    return next((problem for rule in _RULES for problem in rule(config)), None)


def _model(config: Config) -> Iterator[str]:
    if config.model.kind == "emulated" and config.train.precision != "float32":
        yield (
            f'train.precision = "{config.train.precision}", but emulated layers compute nothing '
            "but float32; leave it out"
        )


def _loss(config: Config) -> Iterator[str]:
    if config.train.loss is not None and config.model.kind != "hf":
        yield (
            f'train.loss needs model.kind = "hf", not "{config.model.kind}"; a model of your own '
            "returns its layers and its loss"
        )


def _batch(config: Config) -> Iterator[str]:
    train, replicas = config.train, config.parallel.replicas
    if train.global_batch % replicas:
        near = nearest_divisors(replicas, train.global_batch)
        yield (
            f"parallel.replicas = {replicas} does not divide train.global_batch = "
            f"{train.global_batch}; nearest that do: {near}"
        )
    share = train.global_batch // replicas
    if share % train.micro_batch:
        near = nearest_divisors(train.micro_batch, share)
        wrong = (
            f"train.micro_batch = {train.micro_batch} does not divide train.global_batch / "
            f"parallel.replicas = {share}"
        )
        yield f"{wrong}; nearest that do: {near}"


def _models_of_cases(config: Config) -> Iterator[str]:
    facts = config.facts(config.layer_count, on_cuda=False)
    for case in CASES.values():
        yield from case.model_problems(facts)


def _pipeline(config: Config) -> Iterator[str]:
    yield from problems(config.options, config.layer_count, config.model)


def _data(config: Config) -> Iterator[str]:
    for key, is_set in (
        ("train.patience", config.train.patience is not None),
        ("checkpoint.keep_best", config.checkpoint.keep_best),
    ):
        if is_set and not config.train.eval_every:
            yield f"{key} needs held-out losses; set train.eval_every"
    if config.data.batching == "packed" and config.train.micro_batch == 1:
        yield (
            'data.batching = "packed" packs nothing with train.micro_batch = 1, one sample in each '
            "microbatch; use 2 or more"
        )
    if config.train.eval_every and config.data.held_out == 0:
        yield "train.eval_every needs held-out data; leave out data.held_out = 0, or give a share"


def _cases(config: Config) -> Iterator[str]:
    facts = config.facts(config.layer_count, on_cuda=False)
    for problem in facts.problems():
        # The data tells the steps of epochs, and what depends on them is checked then.
        if config.train.epochs is None or problem in replace(facts, steps=sys.maxsize).problems():
            yield problem


_RULES: tuple[Rule, ...] = (
    _model,
    _loss,
    _batch,
    _pipeline,
    _models_of_cases,
    _data,
    _cases,
)
