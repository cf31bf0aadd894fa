"""Cases of the random test: valid configurations, each drawn from one integer.

The draw avoids impossible combinations by construction. For example, a schedule that needs more
stages than the model has layers is not among the choices. Cases that dynmo refuses all the same are
counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from random import Random
from typing import Any

from dynmo.models.gpt import feed_forward_size
from dynmo.plan.options import BALANCERS
from dynmo.schedule.catalogue import AUTO, SCHEDULES, chunks_of
from tests.equality import RANDOM_MOVES
from tests.fuzz.layers import LAYERS, VOCAB, can_prune
from tests.fuzz.models import FORMS, LOSSES
from tests.fuzz.tokens import experts, placing, spread_experts, token_case

Tables = dict[str, Any]

GPTS = ("gpt", "moe")
STOP = "python:tests.fuzz.models:StopAfter_"
SOURCE = "file:LICENSE"  # from the repository's root
SPREAD = 0.25  # share of the cases whose replicas share experts


@dataclass(frozen=True)
class Case:
    """One case of the random test.

    Attributes:
        number: Number of the case within its seed.
        config: The run under test, as nested tables.
        resumed: The configuration that goes on after `stop`, or None for a run in one go.
        stop: The step after which the first part is asked to stop.
        recorded: Loss and digests that the run had before. Without them, one rank says
            what they must be.
    """

    number: int
    config: Tables
    resumed: Tables | None = None
    stop: int | None = None
    recorded: dict[str, str] | None = None

    @property
    def configs(self) -> list[Tables]:
        """The configuration, and that of the second part."""
        return [self.config] if self.resumed is None else [self.config, self.resumed]

    @property
    def reference(self) -> Tables:
        """The same training on one rank with an ordinary backward, where nothing moves."""
        return reference_of(self.config)

    @property
    def plain(self) -> bool:
        """True if a plain PyTorch loop trains the same.

        That needs float32, and no cases or random numbers.
        """
        model = self.config["model"]
        train = self.config["train"]
        return (
            model["kind"].startswith("python:")
            and not self.reference["dynamism"].get("cases")
            and not any(kind.draws for kind in _kinds(model["kind"]))
            and train.get("precision", "float32") == "float32"
            and train.get("clip_scope", "global") == "global"
        )


def reference_of(config: Tables) -> Tables:
    """The one-rank configuration with the same bits.

    Removes all that may not show in losses, weights and buffers. The accumulation groups stay.
    """
    dynamism = without_stop(config)
    if "freezing" in dynamism:
        dynamism["freezing"] = {**dynamism["freezing"], "cache_bytes": 0}
    return {
        "seed": config["seed"],
        "model": config["model"],
        "data": config["data"],
        "train": {**config["train"], "recompute": "none"},
        "parallel": {"timeout": config["parallel"]["timeout"]},
        "pipeline": {"schedule": "1f1b"},
        "balance": {"balancer": "none"},
        "dynamism": dynamism,
        "trace": {"steps": 0},
    }


def without_stop(config: Tables) -> Tables:
    """The section [dynamism] of the run in one go."""
    dynamism = {**config["dynamism"]}
    if "cases" in dynamism:
        dynamism["cases"] = [case for case in dynamism["cases"] if not case.startswith(STOP)]
    return dynamism


def draw(seed: int, number: int, elastic: float = 0.35) -> Case:
    """Draw a case.

    Args:
        seed: Seed of the whole test.
        number: Number of the case.
        elastic: Share of the cases whose mesh or number of ranks changes, of those that allow it.

    Returns:
        The same case for the same arguments.
    """
    case = _Draw(Random(seed * 1_000_003 + number), number, elastic).case()
    _draw_auto(Random(f"auto {seed} {number}"), case)
    _draw_optimizer(Random(f"optimizer {seed} {number}"), case)
    _draw_head_tokens(Random(f"head_tokens {seed} {number}"), case)
    return case


def _draw_auto(random: Random, case: Case) -> None:
    """Lets a quarter of the runs choose between one and two stages a rank."""
    for config in case.configs:
        pipe, parallel = config["pipeline"], config["parallel"]
        several = parallel["pipeline"] > 1 or len(config["balance"].get("initial", "1")) == 1
        possible = "chunks" not in pipe and "slices" not in parallel and several
        if possible and random.random() < 0.25:
            config["pipeline"] = {**pipe, "schedule": AUTO}


def _draw_head_tokens(random: Random, case: Case) -> None:
    """Cuts the head of a quarter of the models whose head takes one tensor and has dynmo's loss."""
    kind = case.config["model"]["kind"]
    plain = kind in GPTS or (kind.rpartition(":")[2].split("__")[0] in FORMS and "fan_" not in kind)
    if not plain or "early_exit" in case.config["dynamism"] or random.random() >= 0.25:
        return
    tokens = random.choice([1, 3, 8, 64])
    for config in case.configs:
        config["train"] = {**config["train"], "head_tokens": tokens}


def _draw_optimizer(random: Random, case: Case) -> None:
    """Gives a quarter of the cases one of torch's optimizers, which have options of their own."""
    if random.random() >= 0.25:
        return
    is_cut = any(
        config["parallel"].get("zero") or "pruning" in config["dynamism"].get("cases", [])
        for config in case.configs
    )
    names = ["adam", "radam", "adagrad", "rmsprop"]
    name = random.choice(names if is_cut else [*names, "adafactor"])
    for config in case.configs:
        train = {**config["train"], "optimizer": name}
        config["train"] = {k: v for k, v in train.items() if k not in ("weight_decay", "momentum")}


def _kinds(kind: str) -> list[Any]:
    parts = kind.rpartition(":")[2].split("__")[1:]
    return [LAYERS[word] for word in parts if word in LAYERS]


class _Draw:
    """Draws the sections in the order in which they restrict each other."""

    def __init__(self, random: Random, number: int, elastic: float) -> None:
        self._random, self._number, self._elastic_share = random, number, elastic

    def case(self) -> Case:
        random = self._random
        self._spreads = self._chance(SPREAD)
        model, layers = self._model()
        self._low = all(kind.low for kind in _kinds(model["kind"])) and model["kind"] != "emulated"
        self._writes = any(kind.writes for kind in _kinds(model["kind"]))
        draws = any(kind.draws for kind in _kinds(model["kind"])) or bool(model.get("dropout"))
        steps = random.choice([4, 4, 5, 5, 6, 6, 7, 10])
        tokens = token_case(self._random, model["blocks"], steps) if model["kind"] in GPTS else {}
        layers += len(tokens.get("early_exit", {}).get("exits", ()))
        dynamism = self._dynamism(model, layers, steps, tokens)
        freezing = dynamism.get("freezing", {})
        data = self._replicas(model)
        mesh = self._mesh(layers, data)
        total, groups = self._microbatches(*mesh[:3])
        micro = random.choice([1, 1, 2, 3])
        train = self._train(model["kind"] in GPTS, steps, total * micro, micro, groups, layers)
        changes = self._spreads or draws or self._writes or "sparse_attention" in dynamism
        if freezing and not changes and self._chance(0.5):
            freezing["cache_bytes"] = random.choice([3000, 1 << 20])
            train["eval_every"] = random.choice([1, 2])
        config: Tables = {
            "name": f"fuzz-{self._number}",
            "seed": random.randrange(1000),
            "model": model,
            "data": {"source": SOURCE, "shuffle": random.choice(["windows", "batches"])},
            "train": train,
            "dynamism": dynamism,
            "trace": {"steps": random.choice([0, 0, 3])},
            **self._runs_on(mesh, layers, total, groups, train),
        }
        if model["kind"] == "gpt" and self._chance(0.1):
            config["pipeline"]["memory_limit"] = self._limit(model, mesh[0])
        spread_experts(random, config, 1.0 if self._spreads else 0.7)
        if not self._chance(0.3):
            return Case(self._number, config)
        # The second part is another run of the same training.
        possible = [d for d in (1, 2, 3, 4) if fits(groups, d, total)]
        data = 1 if self._writes else random.choice(possible)
        mesh = self._mesh(layers, data, total // data)
        stop = random.randrange(steps - 2)
        resumed = {**config, **self._runs_on(mesh, layers, total, groups, train)}
        recompute = {"recompute": self._recompute(layers)}
        resumed |= {"train": {**train, **recompute}, "checkpoint": {"every": 100}}
        spread_experts(random, resumed, 0.7)
        config |= {"checkpoint": {"every": random.choice([1, 2, 100])}}
        cases = [*dynamism.get("cases", []), f"{STOP}{stop}"]
        config["dynamism"] = {**dynamism, "cases": cases}
        return Case(self._number, config, resumed, stop)

    # -- sections --------------------------------------------------------------------------------

    def _model(self) -> tuple[Tables, int]:
        """The section, and how many layers it makes."""
        random, kind = self._random, self._random.random()
        if kind < 0.03 and not self._spreads:
            layers = random.randrange(2, 9)
            times = {key: random.choice([0.0, 0.0005]) for key in ("f", "b", "w")}
            size = {"layers": layers, "bytes": random.choice([4, 512])}
            return {"kind": "emulated", **size, **times}, layers
        sequence = random.choice([4, 8, 8, 16])
        if kind < 0.45 or self._spreads:
            heads = random.choice([1, 2])
            blocks = random.choice([1, 1, 2, 2, 3, 4])
            hidden = heads * random.choice([4, 6, 8, 16, 48])
            sizes = {"blocks": blocks, "hidden": hidden, "heads": heads}
            chances = {"dropout": random.choice([0.0, 0.0, 0.1]), "tied": self._chance(0.25)}
            moe = self._spreads or self._chance(0.25)
            keys = experts(random, blocks, self._spreads) if moe else {"kind": "gpt"}
            return {**keys, **sizes, "sequence": sequence, **chances}, 2 * blocks + 2
        parts = [random.choice(list(LAYERS)) for _ in range(random.randrange(1, 8))]
        loss = random.choice([*LOSSES, "", ""])
        if self._chance(0.25):
            at = random.randrange(len(parts))
            parts = [*parts[:at], f"fan_{random.choice([1, 2, 3, 5, 9, 20])}", *parts[at:]]
            parts = [w if i <= at or not self._chance(0.3) else "mix" for i, w in enumerate(parts)]
        form = random.choice([FORMS[0], *FORMS]) + (f"_{loss}" if loss else "")
        name = "__".join((form, *parts))
        return {"kind": f"python:tests.fuzz.models:{name}", "sequence": sequence}, len(parts) + 2

    def _replicas(self, model: Tables) -> int:
        if self._spreads:
            return self._random.choice([n for n in (2, 2, 3, 4) if gcd(n, model["experts"]) > 1])
        # Replicas refuse layers that write to their buffers, which is drawn now and then.
        if self._writes and not self._chance(0.03):
            return 1
        often = [1, 2, 2, 4] if model["kind"] == "moe" else [1, 1, 1, 2, 2, 3, 4]
        return self._random.choice(often)

    def _mesh(
        self, layers: int, data: int, each: int | None = None
    ) -> tuple[int, int, str, int | None]:
        """Ranks of a pipeline, replicas, schedule and chunks.

        `each` is the number of microbatches of a replica.
        """
        random = self._random
        lengths = {1: [1, 2, 2, 3, 4, 4], 2: [1, 2, 2]}.get(data, [1])
        pipeline = min(random.choice(lengths), layers)
        choices: list[tuple[str, int | None]] = []
        for name in SCHEDULES:
            for chunks in (None, 3) if name == "interleaved-1f1b" else (None,):
                if name == "interleaved-1f1b" and each is not None and each % pipeline:
                    continue
                if pipeline * chunks_of(name, chunks) <= layers:
                    choices.append((name, chunks))
        return pipeline, data, *random.choice(choices)

    def _microbatches(self, pipeline: int, data: int, schedule: str) -> tuple[int, int]:
        """Microbatches of a step over all replicas, and accumulation groups."""
        random = self._random
        each = random.choice([1, 2, 2, 3, 4, 5])
        if schedule == "interleaved-1f1b":
            each = pipeline * random.choice([1, 1, 2])
        total = each * data
        return total, random.choice([n for n in range(1, total + 1) if fits(n, data, total)])

    def _train(
        self, gpt: bool, steps: int, batch: int, micro: int, groups: int, layers: int
    ) -> Tables:
        random, low = self._random, ["bfloat16", "float16"] if self._low else []
        precision = random.choice(["float32"] * 6 + low) if low else "float32"
        train: Tables = {
            "steps": steps,
            "global_batch": batch,
            "micro_batch": micro,
            "optimizer": random.choice(["adamw", "adamw", "sgd"]),
            "lr": random.choice([1e-3, 1e-2]),
            "warmup": random.choice([0, 2]),
            "decay": random.choice(["cosine", "linear", "constant"]),
            "weight_decay": random.choice([0.0, 0.1]),
            "momentum": random.choice([0.0, 0.9]),
            "max_grad_norm": random.choice([0.0, 0.3, 1.0, 3.0]),
            "clip_scope": random.choice(["global", "global", "local"]),
            "precision": precision,
            "recompute": self._recompute(layers),
            "reduction_slots": groups,
            "eval_every": random.choice([0, 1, 2, 3]),
            "eval_batches": random.choice([1, 3]),
        }
        if precision == "float16":
            # A fixed scale under which gradients overflow ends a run, as it should.
            train["loss_scale"] = random.choice(["dynamic", 128.0]) if gpt else "dynamic"
        elif self._chance(0.1):
            train["loss_scale"] = random.choice(["dynamic", 4.0])
        if train.get("loss_scale") == "dynamic":
            train["loss_scale_window"] = random.choice([1, 2, 2000])
        return train

    def _recompute(self, layers: int) -> str | list[int]:
        some = sorted(self._random.sample(range(layers), self._random.randrange(1, layers + 1)))
        return self._random.choice(["none", "none", "none", "all", "auto", some])

    def _runs_on(
        self,
        mesh: tuple[int, int, str, int | None],
        layers: int,
        total: int,
        groups: int,
        train: Tables,
    ) -> Tables:
        """The sections that may not show in the bits."""
        random, (pipeline, data, schedule, chunks) = self._random, mesh
        stages = pipeline * chunks_of(schedule, chunks)
        parallel: Tables = {"pipeline": pipeline, "replicas": data}
        parallel |= {"device": "cpu", "timeout": 60.0}
        if data > 1:
            parallel["zero"] = random.choice([0, 1])
        sliced = pipeline > 1 and not self._spreads and self._chance(0.05)
        if sliced:
            parallel["slices"] = True
        pipe: Tables = {"schedule": schedule}
        if chunks is not None:
            pipe["chunks"] = chunks
        if not sliced and self._chance(0.35):
            pipe["post_validation"] = True
            # A step undone by arithmetic differs in the last bits. Here none is undone.
            peaceful = train["max_grad_norm"] == 0 or train["clip_scope"] == "local"
            if peaceful and train["precision"] != "float16" and self._chance(0.5):
                pipe["rollback"] = "in-place"
        balancer = random.choice([RANDOM_MOVES, RANDOM_MOVES, "exact", "diffusion", *BALANCERS])
        balance: Tables = {"balancer": balancer, "cost": random.choice(["time", "parameters"])}
        balance["every"] = random.choice([1, 1, 2, 3, "auto"])
        balance |= random.choice([{}, {"margin": 0.0, "hysteresis": 0.0}])
        if self._chance(0.3):
            balance["initial"] = self._composition(layers, stages)
        elastic: Tables = {}
        if not sliced and not self._writes and self._chance(self._elastic_share):
            elastic = self._elastic(mesh, layers, total, groups, train["steps"])
        return {"parallel": parallel, "pipeline": pipe, "balance": balance, "elastic": elastic}

    def _limit(self, model: Tables, pipeline: int) -> int:
        """A limit near what the whole model takes on one rank.

        For several ranks it is a share of that.
        """
        hidden = model["hidden"]
        block = 4 * hidden**2 + 3 * hidden * feed_forward_size(hidden)
        parameters = 2 * VOCAB * hidden + model["blocks"] * block
        shares = [1.0, 3.0] if pipeline == 1 else [0.7, 1.0, 3.0]
        return int((1 << 19) + 24 * parameters * self._random.choice(shares))

    def _elastic(
        self,
        mesh: tuple[int, int, str, int | None],
        layers: int,
        total: int,
        groups: int,
        steps: int,
    ) -> Tables:
        random, (pipeline, data, schedule, chunks) = self._random, mesh
        ranks = pipeline * data

        def meshes(ranks: int) -> list[tuple[int, int]]:
            return [
                (ranks // replicas, replicas)
                for replicas in range(1, ranks + 1)
                if ranks % replicas == 0
                and ranks // replicas * chunks_of(schedule, chunks) <= layers
                and fits(groups, replicas, total)
                and (replicas == data or not self._spreads)
                and (schedule != "interleaved-1f1b" or total // replicas % (ranks // replicas) == 0)
            ]

        others = same = meshes(ranks)
        if len(same) > 1 and self._chance(0.25):
            return {"reshape": True}
        # With fewer ranks the others leave and wait, and may be called back.
        if len(same) <= 1 or not self._chance(0.3):
            others = [each for some in range(1, ranks + 1) for each in meshes(some)]
        if len(others) < 2:
            return {}
        at = sorted(random.sample(range(1, steps), min(steps - 1, random.randrange(1, 4))))
        return {"reshape_at": [[step, *random.choice(others)] for step in at], "park": True}

    def _composition(self, layers: int, stages: int) -> list[int]:
        cuts = sorted(self._random.sample(range(1, layers), stages - 1))
        return [b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True)]

    def _dynamism(self, model: Tables, layers: int, steps: int, tokens: Tables) -> Tables:
        random, cases = self._random, list(tokens)
        tables: Tables = {**tokens}
        gpt, emulated = model["kind"] in GPTS, model["kind"] == "emulated"
        if model["kind"] == "moe" and (model["routing"] == "bias" or self._chance(0.5)):
            cases.append("experts")
            tables["experts"] = placing(random)
        if self._chance(0.45):
            cases.append("freezing")
            egeria = not tokens and not self._spreads
            tables["freezing"] = self._freezing(layers, steps, egeria)
        prunes = gpt or (not emulated and can_prune(tuple(model["kind"].split("__")[1:])))
        if prunes and self._chance(0.25):
            cases.append("pruning")
            tables["pruning"] = self._pruning(steps)
        if gpt and not tokens and self._chance(0.25):
            cases.append("sparse_attention")
            tables["sparse_attention"] = self._sparse_attention(model, steps)
        if gpt and not tokens and self._chance(0.1):  # its layers hand on one tensor
            cases.append("python:tests.cases.own_case:LayerDrop")
        if "freezing" in cases and self._chance(0.15):
            cases.append("python:tests.cases.thawing:Thawing")
        random.shuffle(cases)
        return {"cases": cases, **tables} if cases else {}

    def _freezing(self, layers: int, steps: int, egeria: bool) -> Tables:
        random = self._random
        policies = ["schedule", "autofreeze", *(["egeria"] * 3 if steps >= 10 and egeria else [])]
        policy = random.choice(policies)
        if policy == "schedule":
            at = sorted(random.sample(range(steps), random.randrange(1, 4)))
            frozen = sorted(random.randrange(layers) for _ in at)
            return {"policy": policy, "schedule": [*map(list, zip(at, frozen, strict=True))]}
        options: Tables = {"policy": policy, "every": 1, "unit": random.choice(["half", "block"])}
        if self._chance(0.5) and layers > 2:
            options["max_layers"] = random.randrange(1, layers)
        if policy == "egeria":
            window = random.choice([2, 3])
            options |= {"window": window, "refresh": 200, "tolerance": random.choice([0.5, 0.99])}
            options["thaw"] = random.choice([0.1, 0.6])
        return options

    def _pruning(self, steps: int) -> Tables:
        random = self._random
        start = random.randrange(steps - 1)
        end = random.randrange(start, steps)
        final = random.choice([0.5, 0.9, 0.99])
        return {
            "criterion": random.choice(["global", "local"]),
            "initial_sparsity": random.choice([0.0, 0.4]),
            "final_sparsity": final,
            "start": start,
            "end": end,
            "every": random.randrange(1, max(1, end - start) + 1),
            "dense_below": random.choice([0.0, 0.6, 0.6]),
        }

    def _sparse_attention(self, model: Tables, steps: int) -> Tables:
        random, blocks = self._random, range(model["blocks"])
        kind = random.choice(["hash", "drop"])
        options: Tables = {"kind": kind, "tile": random.choice([2, 32])}
        if kind == "hash":
            options["buckets"] = random.choice([2, 4])
        else:
            options["drop"] = random.choice([0.3, 0.5])
        sizes = range(1, len(blocks) + 1)
        some = [sorted(random.sample(blocks, random.choice(sizes))) for _ in range(2)]
        if self._chance(0.5):
            at = sorted(random.sample(range(steps), 2))
            return {**options, "schedule": [*map(list, zip(at, some, strict=True))]}
        return {**options, "start": random.randrange(steps), "blocks": some[0]}

    # -- conditions ------------------------------------------------------------------------------

    def _chance(self, share: float) -> bool:
        return self._random.random() < share


def fits(groups: int, replicas: int, microbatches: int) -> bool:
    """True if this number of accumulation groups fits the replicas and microbatches."""
    each, rest = divmod(groups, replicas)
    split = microbatches % groups == 0 and microbatches % replicas == 0
    return split and not rest and (replicas == 1 or each & (each - 1) == 0)
