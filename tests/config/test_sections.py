"""A bad value or combination of a configuration is refused in one line that names the key."""

import ast
import tomllib
from functools import reduce
from operator import getitem

import pytest

from dynmo.config import load, parse
from tests.config.refusal import refusal

FREEZING, PRUNING = "dynamism.cases=['freezing']", "dynamism.cases=['pruning']"
EXIT, DEPTHS = "dynamism.cases=['early_exit']", "dynamism.cases=['mixture_of_depths']"
CACHED = "dynamism.freezing.cache_bytes=4096"
SPREAD = ("model.kind=moe", "parallel.replicas=2", "parallel.expert=2")


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("model.kind", "gtp", "'gpt', 'moe', 'emulated' or 'hf' or python:package.module:function"),
        ("model.kind", "python:nothing", "python:package.module:function"),
        ("model.kind", "python:a/b:c", "python:package.module:function"),
        ("model.dropout", "1", "less than 1"),
        ("model.f", "x", "number or a list"),
        ("model.f", "inf", "finite"),
        ("model.f", "[0.1, -1]", "model.f[1]"),
        ("model.f", "[0.1, true]", "model.f[1]"),
        ("data.source", "wiki", "'stdlib' or file:PATH, tokens:PATH"),
        ("data.source", "file:", "'stdlib' or file:PATH, tokens:PATH"),
        ("train.optimizer", "adamm", "'radam', 'rmsprop' or 'rprop' or python:package"),
        ("train.loss_scale", "0", "'dynamic' or greater than or equal to 1"),
        ("train.loss_scale", "3", "power of two"),
        ("train.loss_scale", "true", "number"),
        ("train.recompute", "al", "'none', 'all' or 'auto' or a list"),
        ("train.recompute", "[1, -1]", "train.recompute[1]"),
        ("train.recompute", "2", "list"),
        ("train.global_batch", "3000000000", "less than or equal"),
        ("train.eps", "0", "greater than 0"),
        ("train.warmup", "0.03", "a whole number, not a share"),
        ("parallel.zero", "2", "less than or equal to 1"),
        ("parallel.timeout", "inf", "finite"),
        ("pipeline.schedule", "zb-h3", "'zb-h1', 'zb-h2', 'interleaved-1f1b'"),
        ("pipeline.memory_limit", "40XB", "40GiB"),
        ("pipeline.memory_limit", "0", "greater than or equal to 1"),
        ("pipeline.memory_limit", "true", "integer"),
        ("pipeline.memory_limit", '["1GiB", 0]', "pipeline.memory_limit[1]"),
        ("pipeline.memory_limit", '["1GiB", "1XB"]', "40GiB"),
        ("balance.balancer", "exat", "'exact' or 'diffusion' or python:"),
        ("balance.initial", "[18, 0]", "balance.initial[1] = 0"),
        ("balance.every", "0", "'auto' or greater than or equal to 1"),
        ("balance.every", "atuo", "'auto' or a valid integer"),
        ("balance.every", "true", "integer"),
        ("balance.every", "2.5", "integer"),
        ("dynamism.cases", '["freezing", "freezing"]', "twice"),
        ("dynamism.cases", '["frezing"]', "dynamism.cases[0]"),
        ("dynamism.freezing.schedule", "[[5, 1], [5, 2]]", "ascend"),
        ("dynamism.freezing.schedule", "[[5, 2], [6, 1]]", "never be fewer"),
        ("dynamism.freezing.schedule", "[[5]]", "dynamism.freezing.schedule[0][1]"),
        ("dynamism.freezing.cache_bytes", "-1", "greater than or equal to 0"),
        ("dynamism.freezing.cache_bytes", "2XB", "40GiB"),
        ("dynamism.pruning.dense_below", "1.5", "'auto' or 'measured' or less than or equal to 1"),
        ("dynamism.pruning.dense_below", "{16x16 = 2}", "dynamism.pruning.dense_below.16x16"),
        ("dynamism.pruning.dense_below", "{16 = 0.5}", "dynamism.pruning.dense_below.16"),
        ("dynamism.sparse_attention.buckets", "3", "multiple of 2"),
        ("elastic.reshape_at", "[[3, 1, 2], [3, 2, 1]]", "step 3 after step 3"),
        ("elastic.reshape_at", "[[3, 1]]", "elastic.reshape_at[0][2]"),
        ("elastic.reshape_at", "[[0, 1, 2]]", "elastic.reshape_at[0][0]"),
        ("seed", "-1", "greater than or equal to 0"),
    ],
)
def test_bad_values_are_refused(key, value, hint):
    message = refusal(f"{key}={value}")
    assert message.startswith(f"--set: {key}")
    assert hint in message


def test_a_number_out_of_bounds_gets_no_advice_on_lists():
    told = "--set: pipeline.memory_limit = 0: must be greater than or equal to 1"
    assert refusal("pipeline.memory_limit=0") == told


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["train.micro_batch=3"], ["train.micro_batch = 3", "2, 4"]),
        (["train.micro_batch=64"], ["train.micro_batch = 64", "32"]),
        (["model.heads=3"], ["model.heads = 3", "model.hidden = 256", "2, 4"]),
        (["model.hidden=12"], ["model.hidden / model.heads = 3", "hidden = 16"]),
        (["parallel.replicas=5"], ["parallel.replicas = 5", "train.global_batch = 32", "4, 8"]),
        (["parallel.replicas=16"], ["train.micro_batch = 4", "parallel.replicas = 2"]),
        (["train.reduction_slots=3"],
         ["train.reduction_slots = 3", "8 microbatches", "1 or 2 or 4"]),
        (["train.global_batch=48", "parallel.replicas=2", "train.reduction_slots=6"],
         ["train.reduction_slots = 6", "2 (replicas)", "2 or 4"]),
        (["parallel.replicas=4", "train.reduction_slots=2"],
         ["train.reduction_slots = 2", "4 (replicas)", "4 or 8"]),
        (["parallel.slices=true"], ["parallel.slices = true", "parallel.pipeline = 1 is one rank"]),
        (["parallel.pipeline=2", "parallel.slices=true", "pipeline.post_validation=true"],
         ["parallel.slices = true", "pipeline.post_validation"]),
        (["parallel.pipeline=2", "parallel.slices=true", "elastic.reshape_at=[[5, 1, 2]]"],
         ["parallel.slices = true", "elastic.reshape_at"]),
        (["parallel.pipeline=2", "parallel.slices=true", "elastic.repack=true"],
         ["parallel.slices = true", "elastic.repack"]),
        (["elastic.repack=true", "elastic.min_ranks=2"], ["elastic.min_ranks = 2", "1 ranks"]),
        (["parallel.pipeline=2", "elastic.repack=true", "elastic.reshape_at=[[5, 1, 1]]"],
         ["elastic.repack = true", "elastic.reshape_at"]),
        (["parallel.pipeline=2", "train.reduction_slots=2", "elastic.target_ranks=1",
          "elastic.reshape=true"],
         ["elastic.target_ranks = 1", "elastic.reshape"]),
        (["elastic.target_ranks=2", "elastic.min_ranks=3"],
         ["elastic.target_ranks = 2", "elastic.min_ranks = 3"]),
        (["model.blocks=1", "elastic.target_ranks=9"], ["elastic.target_ranks = 9", "no mesh"]),
        (["model.kind=moe", "model.experts=4", "parallel.replicas=2", "parallel.expert=2",
          "elastic.target_ranks=1"], ["elastic.target_ranks = 1", "the 2 replicas"]),
        (["elastic.algorithm=python:own.rules:merge"],
         ['elastic.algorithm = "python:own.rules:merge"', "elastic.repack = true"]),
        (["elastic.algorithm=python:own.rules:merge", "elastic.repack=true"],
         ['elastic.algorithm = "python:own.rules:merge"', "pipeline.memory_limit"]),
        (["elastic.releaser=command"],
         ['elastic.releaser = "command"', "elastic.release_command", "elastic.grow_command"]),
        (["elastic.release_command=['true']"],
         ["elastic.release_command", 'elastic.releaser = "command"']),
        (["parallel.replicas=2", "elastic.reshape_at=[[100, 2, 1]]"],
         ["elastic.reshape_at: [100, 2, 1]", "100 steps"]),
        (["parallel.pipeline=2", "elastic.reshape_at=[[5, 1, 2]]"],
         ["elastic.reshape_at: [5, 1, 2]", "train.reduction_slots = 1", "2 or 4 or 8"]),
        (["parallel.pipeline=3", "elastic.reshape_at=[[5, 1, 3]]"],
         ["elastic.reshape_at: [5, 1, 3]", "8 microbatches"]),
        (["model.blocks=1", "parallel.replicas=8", "elastic.reshape_at=[[5, 8, 1]]"],
         ["elastic.reshape_at: [5, 8, 1]", "8 stages", "4 layers"]),
        (["parallel.pipeline=2", "elastic.reshape=true"],
         ["elastic.reshape = true", "train.reduction_slots = 1", "2 or 4 or 8"]),
        (["elastic.reshape=true"], ["elastic.reshape = true", "1 rank and 8 microbatches"]),
        (["parallel.replicas=2", "elastic.reshape=true", "elastic.reshape_at=[[5, 2, 1]]"],
         ["elastic.reshape = true", "elastic.reshape_at"]),
        (["model.blocks=1", "parallel.pipeline=5"], ["parallel.pipeline = 5", "4 layers"]),
        (["model.kind=emulated", "parallel.pipeline=9"], ["parallel.pipeline = 9", "8 layers"]),
        (["balance.initial=[9, 9]"], ["balance.initial", "2 entries", "parallel.pipeline = 1"]),
        (["model.kind=python:a:b", "balance.initial=[9, 8]"],
         ["balance.initial", "2 entries", "parallel.pipeline = 1"]),
        (["balance.initial=[9, 8]", "parallel.pipeline=2"],
         ["balance.initial sums to 17", "18 layers"]),
        (["train.precision=float16", "train.loss_scale=1"],
         ["train.loss_scale = 1", 'train.precision = "float16"']),
        (["train.recompute=[3, 18]"], ["train.recompute names layer 18", "0 to 17"]),
        (["model.kind=emulated", "model.w=[1, 2]"], ["model.w lists 2 layers", "model.layers = 8"]),
        (["model.kind=emulated", "train.precision=bfloat16"],
         ['train.precision = "bfloat16"', "emulated"]),
        ([FREEZING, "dynamism.freezing.policy=schedule"], ["dynamism.freezing.schedule is empty"]),
        ([FREEZING, "dynamism.freezing.schedule=[[1, 18]]"],
         ["dynamism.freezing.schedule", "18 layers"]),
        ([FREEZING, "dynamism.freezing.schedule=[[100, 1], [200, 3]]"],
         ["dynamism.freezing.schedule", "step 100", "100 steps"]),
        ([FREEZING, "dynamism.freezing.max_layers=18"],
         ["dynamism.freezing.max_layers", "18 layers"]),
        ([FREEZING, CACHED, "model.dropout=0.1"],
         ["dynamism.freezing.cache_bytes = 4096", "model.dropout = 0.1"]),
        (["dynamism.cases=['freezing', 'sparse_attention']", CACHED],
         ["dynamism.freezing.cache_bytes = 4096", "sparse_attention"]),
        ([FREEZING, CACHED, "train.eval_every=101"],
         ["dynamism.freezing.cache_bytes = 4096", "comes again", "train.eval_every"]),
        ([FREEZING, CACHED, "train.eval_every=51"],
         ["dynamism.freezing.cache_bytes = 4096", "comes again", "train.eval_every"]),
        ([PRUNING, "model.kind=emulated"], ["dynamism.pruning", "emulated model"]),
        ([PRUNING, "dynamism.pruning.end=100"], ["dynamism.pruning.end = 100", "100 steps"]),
        ([PRUNING, "dynamism.pruning.start=200"], ["dynamism.pruning.start = 200", "100 steps"]),
        ([PRUNING, "dynamism.pruning.start=9", "dynamism.pruning.end=8"],
         ["dynamism.pruning.start = 9", "end = 8"]),
        ([PRUNING, "dynamism.pruning.every=41"], ["dynamism.pruning.every = 41", "40 steps"]),
        ([PRUNING, "dynamism.pruning.initial_sparsity=0.95"],
         ["dynamism.pruning.initial_sparsity = 0.95", "final_sparsity = 0.9"]),
        ([EXIT, "model.kind=emulated"], ["dynamism.early_exit", 'model.kind = "emulated"']),
        ([EXIT, "model.blocks=1"], ["dynamism.early_exit", "1 blocks"]),
        ([EXIT, "dynamism.early_exit.exits=[3, 1]"],
         ["dynamism.early_exit.exits = [3, 1]", "ascend"]),
        ([EXIT, "dynamism.early_exit.exits=[7]"],
         ["dynamism.early_exit.exits names block 7", "0 to 6"]),
        ([EXIT, "dynamism.early_exit.start=100"], ["dynamism.early_exit.start = 100", "100 steps"]),
        ([EXIT, "dynamism.early_exit.policy=adp-c", "dynamism.early_exit.confidence=state"],
         ['dynamism.early_exit.confidence = "state"', '"calm"']),
        ([EXIT, "train.compile=true"], ["train.compile = true", '"early_exit"']),
        (["dynamism.cases=['early_exit', 'sparse_attention']"],
         ["dynamism.cases", '"sparse_attention" and "early_exit"']),
        (["dynamism.cases=['early_exit', 'mixture_of_depths']"],
         ["dynamism.cases", '"early_exit" and "mixture_of_depths"']),
        (["dynamism.cases=['early_exit', 'freezing']", "dynamism.freezing.policy=egeria",
          "train.steps=2000"],
         ['dynamism.freezing.policy = "egeria"', '"early_exit"']),
        ([DEPTHS, "model.kind=emulated"],
         ["dynamism.mixture_of_depths", 'model.kind = "emulated"']),
        ([DEPTHS, "dynamism.mixture_of_depths.every=9"],
         ["dynamism.mixture_of_depths.every = 9", "8 blocks"]),
        ([DEPTHS, "dynamism.mixture_of_depths.capacity=0.001"],
         ["dynamism.mixture_of_depths.capacity = 0.001", "model.sequence = 256", "0.002"]),
        ([DEPTHS, "dynamism.mixture_of_depths.threshold_from=100"],
         ["dynamism.mixture_of_depths.threshold_from = 100", "100 steps"]),
        (["dynamism.cases=['experts']"], ["dynamism.cases", '"experts"', 'model.kind = "gpt"']),
        (["model.kind=moe", "model.top_k=9"], ["model.top_k = 9", "model.experts = 8"]),
        (["model.kind=moe", "model.moe_every=9"], ["model.moe_every = 9", "8 blocks"]),
        (["model.kind=moe", "model.capacity_factor=0.001"], ["model.capacity_factor = 0.001"]),
        (["model.kind=moe", "model.routing=bias"], ['model.routing = "bias"', "dynamism.cases"]),
        (["parallel.expert=2"], ["parallel.expert = 2", 'model.kind = "gpt"']),
        ([*SPREAD, "parallel.replicas=2", "parallel.expert=4"],
         ["parallel.expert = 4", "parallel.replicas = 2"]),
        (["parallel.pipeline=2", "pipeline.memory_limit=['1GiB']"],
         ["pipeline.memory_limit has 1 entries", "parallel.pipeline = 2"]),
        (["parallel.pipeline=2", "pipeline.memory_limit=[9, 9]", "elastic.repack=true"],
         ["pipeline.memory_limit lists the ranks", "[elastic]"]),
        ([*SPREAD, "model.experts=3"], ["parallel.expert = 2", "model.experts = 3"]),
        ([*SPREAD, "elastic.reshape=true"], ["parallel.expert = 2", "elastic.reshape"]),
        ([*SPREAD, FREEZING, "dynamism.freezing.policy=egeria"],
         ["parallel.expert = 2", 'dynamism.freezing.policy = "egeria"']),
        ([*SPREAD, FREEZING, "dynamism.freezing.cache_bytes=1"],
         ["parallel.expert = 2", "dynamism.freezing.cache_bytes"]),
        (["model.kind=hf", "data.source=jsonl:a", "data.batching=packed", "train.micro_batch=1"],
         ['data.batching = "packed"', "train.micro_batch = 1", "use 2 or more"]),
        (["model.kind=moe", "train.compile=true"], ["train.compile = true", 'model.kind = "moe"']),
    ],
)  # fmt: skip
def test_conflicting_keys_are_refused(overrides, named):
    """The message names the keys with their values, and suggests valid numbers."""
    message = refusal(*overrides)
    assert message.startswith(f"defaults and --set: {named[0]}")
    assert all(part in message for part in named)


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.pipeline=18"],
        ["balance.initial=[10, 8]", "parallel.pipeline=2"],
        ["model.kind=python:a:b", "parallel.pipeline=99"],  # only the function knows
        [FREEZING],
        [FREEZING, "dynamism.freezing.schedule=[[1, 17]]"],
        [FREEZING, "dynamism.freezing.schedule=[[5, 1], [200, 3]]"],  # a run may be cut short
        ["train.reduction_slots=1"],
        [FREEZING, CACHED, "train.eval_every=50"],
        # The data tells how long an epoch is.
        [FREEZING, CACHED, "train.eval_every=51", "data.shuffle=batches"],
        [FREEZING, CACHED, "train.eval_every=51", "train.micro_batch=1"],
    ],
)
def test_compatible_keys_are_accepted(overrides):
    """The configuration has the given values, and reads back from its own TOML."""
    config = load(None, overrides)
    assert parse(tomllib.loads(config.to_toml())) == config
    for path, _, text in (override.partition("=") for override in overrides):
        value = reduce(getitem, path.split("."), config.model_dump(mode="json"))
        assert value == (text if ":" in text or text == "batches" else ast.literal_eval(text))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([PRUNING, "model.kind=emulated"], "dynamism.pruning: an emulated model"),
        ([PRUNING, "dynamism.pruning.start=9", "dynamism.pruning.end=8"], "is after end = 8"),
        ([EXIT, "model.blocks=1"], "dynamism.early_exit: a model of 1 blocks"),
        ([FREEZING, CACHED, "data.source=jsonl:a", "model.kind=hf"], "no microbatch comes again"),
        ([PRUNING], None),
        ([PRUNING, "dynamism.pruning.end=200"], None),
        ([EXIT], None),
        ([EXIT, "dynamism.early_exit.start=200"], None),
        ([FREEZING, "dynamism.freezing.policy=egeria"], None),
        ([FREEZING, CACHED, "train.eval_every=51"], None),
    ],
)
def test_cases_of_a_run_in_epochs_are_checked_but_for_the_steps(overrides, told):
    if told is None:
        load(None, ["train.epochs=2", *overrides])
    else:
        assert told in refusal("train.epochs=2", *overrides)


def test_mesh_of_a_step_follows_reshape_at():
    groups, meshes = "train.reduction_slots=4", "elastic.reshape_at=[[5, 2, 2], [9, 1, 4]]"
    config = load(overrides=["parallel.pipeline=4", groups, meshes])
    shapes = [config.options.shape_at(step) for step in (0, 4, 5, 8, 9, 99)]
    assert shapes == [(4, 1)] * 2 + [(2, 2)] * 2 + [(1, 4)] * 2
    wide = load(overrides=["parallel.replicas=2", "parallel.pipeline=2"])
    for run, counts in ((config, (4, 4, 8, 8)), (wide, (4, 2, 4, 8))):
        microbatches = (run.microbatches, run.all_microbatches)
        assert (run.ranks, run.options.accumulation_groups, *microbatches) == counts
