"""Mistakes that a type checker shows to users. `make check` fails if one is not shown any more."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

import dynmo


def mistakes(model: dynmo.Model, world: dynmo.World, pipeline: dynmo.Pipeline) -> None:
    pipeline.stepp()  # pyright: ignore[reportAttributeAccessIssue]
    dynmo.Pipelin  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
    dynmo.huggingface.generat  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
    dynmo.init(backend="nccl")  # pyright: ignore[reportArgumentType]
    pipeline.move((2, 1), schedule="zb-h7")  # pyright: ignore[reportArgumentType]
    dynmo.Pipeline(
        model,
        world,
        microbatches=2,
        schedule="zb-h7",  # pyright: ignore[reportArgumentType]
        optimizer="adamw",  # pyright: ignore[reportArgumentType]
        balance="exakt",  # pyright: ignore[reportArgumentType]
        precision="bf16",  # pyright: ignore[reportArgumentType]
        training=dynmo.Training(
            rollback="inplace",  # pyright: ignore[reportArgumentType]
            clip_scope="layer",  # pyright: ignore[reportArgumentType]
            loss_scale="auto",  # pyright: ignore[reportArgumentType]
            recompute="some",  # pyright: ignore[reportArgumentType]
        ),
    )


def mistakes_in_options() -> None:
    dynmo.AdamW(lrr=1e-3)  # pyright: ignore[reportCallIssue]
    dynmo.SGD(1e-3)  # pyright: ignore[reportCallIssue]
    dynmo.AdamW(lr="fast")  # pyright: ignore[reportArgumentType]
    dynmo.Freezing(schedul=[[10, 5]])  # pyright: ignore[reportCallIssue]
    dynmo.LearningRate(decay="cos")  # pyright: ignore[reportArgumentType]
    dynmo.ModelOptions(hiden=3)  # pyright: ignore[reportCallIssue]
    # What is right: lists, and sizes with a unit.
    dynmo.AdamW(betas=[0.9, 0.95])
    dynmo.Freezing(schedule=[[10, 5]], cache_bytes="2GiB")
    dynmo.Elastic(reshape_at=[[8, 2, 1]])
    dynmo.EarlyExit(exits=[0, 1])
