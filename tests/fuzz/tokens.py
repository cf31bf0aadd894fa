"""Draws of the random test for cases that choose tokens, and for experts."""

from __future__ import annotations

from math import gcd
from random import Random
from typing import Any

Tables = dict[str, Any]

# Thresholds for each measure of confidence. Some tokens of an untrained model are over these, and
# some are not.
THRESHOLDS = {
    "softmax": [0.0005, 0.002, 0.005],
    "state": [0.9, 0.99, 0.999],
    "classifier": [0.49, 0.5, 0.51],
}


def token_case(random: Random, blocks: int, steps: int) -> Tables:
    """A case that chooses tokens, and its section.

    Both are empty if there is none.
    """
    if random.random() > 0.35:
        return {}
    if blocks > 1 and random.random() < 0.5:
        some = sorted(random.sample(range(blocks - 1), random.randrange(1, blocks)))
        policy = random.choice(["calm", "calm", "adp-c"])
        confidence = random.choice(list(THRESHOLDS))
        kind = confidence if policy == "calm" else "softmax"
        options: Tables = {"policy": policy, "confidence": kind, "exits": some}
        options["start"] = random.randrange(steps)
        options["threshold"] = random.choice([*THRESHOLDS[kind], 0.0, 1.0])
        options["record_every"] = random.choice([1, 2, 10])
        return {"early_exit": options}
    options = {
        "capacity": random.choice([0.125, 0.3, 0.5, 1.0]),
        "every": random.randrange(1, blocks + 1),
        "predictor": random.choice(["mlp", "bce"]),
        "predictor_weight": random.choice([0.01, 1.0]),
        "record_every": random.choice([1, 2, 10]),
    }
    if random.random() < 0.5:
        options["threshold_from"] = random.randrange(steps)
    return {"mixture_of_depths": options}


def experts(random: Random, blocks: int, several: bool) -> Tables:
    """The keys of [model] that only a model with experts has."""
    count = random.choice([2, 3, 4, 8] if several else [1, 2, 3, 8])
    keys: Tables = {
        "kind": "moe",
        "experts": count,
        "top_k": random.randrange(1, min(3, count) + 1),
        "shared_experts": random.choice([0, 0, 1, 2]),
        "moe_every": random.randrange(1, min(2, blocks) + 1),
        "routing": random.choice(["aux-loss", "sinkhorn", "auction", "bias"]),
        "router_loss": random.choice([0.01, 1.0]),
    }
    if count <= 4 and random.random() < 0.3:
        keys["capacity_factor"] = random.choice([1.0, 2.0])
    return keys | {"bias_rate": random.choice([0.001, 0.1])}


def placing(random: Random) -> Tables:
    """The section of the case "experts"."""
    return {
        "record_every": random.choice([1, 2, 10]),
        "place_every": random.choice([0, 1, 2, 3]),
        "redundant": random.choice([0, 0, 1, 2]),
        "least_gain": random.choice([0.0, 0.05]),
    }


def spread_experts(random: Random, config: Tables, share: float) -> None:
    """Spreads experts over replicas in this share of the cases that allow it."""
    model, parallel, dynamism = config["model"], config["parallel"], config["dynamism"]
    freezing = dynamism.get("freezing", {})
    shared = gcd(parallel["replicas"], model.get("experts", 1)) if model["kind"] == "moe" else 1
    elastic = config["elastic"]
    meshes = elastic.get("reshape_at", ())
    others = any(data != parallel["replicas"] for _, _, data in meshes) or elastic.get("reshape")
    cached = freezing.get("cache_bytes") or freezing.get("policy") == "egeria"
    refused = parallel.get("slices") or others or cached
    sizes = [size for size in range(2, shared + 1) if shared % size == 0]
    if sizes and not refused and random.random() < share:
        parallel["expert"] = random.choice(sizes)
