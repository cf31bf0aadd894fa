"""Damaged checkpoints: refused in one line by all ranks, or the one before is used."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dynmo.runtime.state import checkpoint
from tests.combinations import mostly_matrix
from tests.pool import Pool

JOBS = "tests.runtime.jobs.damage:"
CONFIG: dict[str, Any] = {
    "model": {"blocks": 1, "hidden": 8, "heads": 1, "sequence": 4},
    "data": {"source": "file:LICENSE"},
    "train": {"steps": 4, "global_batch": 2, "micro_batch": 1},
    "parallel": {"pipeline": 2, "timeout": 60.0},
    "balance": {"balancer": "none"},
    "checkpoint": {"every": 1, "keep": 9},
    "trace": {"steps": 0},
}
NEWEST, OLDER, REFUSED = "newest", "older", "refused"


@dataclass(frozen=True)
class Saved:
    """The checkpoints of a training that stopped after step 3 of 4, and those of another one."""

    folder: Path
    other: Path

    @property
    def newest(self) -> Path:
        return self.folder / "checkpoints/step-000003"

    @property
    def older(self) -> Path:
        return self.folder / "checkpoints/step-000002"

    @property
    def manifest(self) -> Path:
        return self.newest / "manifest.json"

    def layer(self, index: int = 1) -> Path:
        return self.newest / f"layer-{index:04d}"


Damage = Callable[[Saved], None]


def _edit(name: str, change: Callable[[bytes], bytes], saved: Saved) -> None:
    path = saved.newest / name
    path.write_bytes(change(path.read_bytes()))


def _flip(at: float, data: bytes) -> bytes:
    """Flips a bit of the byte at this share of the data."""
    place = min(len(data) - 1, int(at * len(data)))
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


def _gone(name: str, saved: Saved) -> None:
    path = saved.folder / "checkpoints" / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _replaced(name: str, make: Callable[[Path], object], saved: Saved) -> None:
    path = saved.folder / "checkpoints" / name
    _gone(name, saved)
    make(path)


def _linked(name: str, target: str, saved: Saved) -> None:
    _replaced(name, lambda path: path.symlink_to(target), saved)


def _copied(name: str, source: Callable[[Saved], Path], saved: Saved) -> None:
    shutil.copy(source(saved) / name, saved.newest / name)


def _swapped(name: str, saved: Saved) -> None:
    first, second = saved.layer(1) / name, saved.layer(2) / name
    aside = first.rename(saved.folder / "aside")
    second.rename(first)
    aside.rename(second)


def _unread_tensors(saved: Saved) -> None:
    """A file of the other training beside the right one, as torch's DCP would take it."""
    source = saved.other / "checkpoints/step-000003/layer-0001/tensors.safetensors"
    shutil.copy(source, saved.layer() / "zzz.safetensors")
    shutil.copy(source, saved.layer() / "000.safetensors")


def _with_state(changes: dict[str, Any], saved: Saved) -> None:
    """A whole manifest with another state."""
    manifest = checkpoint.read(saved.newest)
    state = {**manifest.state, **changes}
    state = {key: value for key, value in state.items() if value != "missing"}
    saved.manifest.write_text(checkpoint.sealed(manifest.model_copy(update={"state": state})))


def _all_flipped(saved: Saved) -> None:
    for path in saved.folder.glob("checkpoints/*/layer-0001/tensors.safetensors"):
        path.write_bytes(_flip(0.7, path.read_bytes()))


def _damages() -> dict[str, tuple[Damage, str]]:
    """Each damage by its name, and which checkpoint may be used after it."""
    files = {"M": "manifest.json", "T": "layer-0001/tensors.safetensors"}
    files |= {"J": "layer-0001/layer.json"}
    damages: dict[str, tuple[Damage, str]] = {}
    for key, file in files.items():
        edits: dict[str, Callable[[bytes], bytes]] = {
            "empty": lambda data: b"",
            "half": lambda data: data[: len(data) // 2],
            "cut": lambda data: data[:-1],
            "longer": lambda data: data + b"\n",
            "zeros": lambda data: bytes(len(data)),
            "flip first": partial(_flip, 0.0),
            "flip header": partial(_flip, 0.05),
            "flip middle": partial(_flip, 0.5),
            "flip last": partial(_flip, 1.0),
        }
        for name, edit in edits.items():
            damages[f"{key} {name}"] = partial(_edit, file, edit), OLDER
        inside = f"step-000003/{file}"
        damages[f"{key} gone"] = partial(_gone, inside), OLDER
        damages[f"{key} folder"] = partial(_replaced, inside, Path.mkdir), OLDER
        damages[f"{key} pipe"] = partial(_replaced, inside, os.mkfifo), OLDER
        for target in ("/dev/zero", "/nowhere", Path(file).name):
            damages[f"{key} link {target}"] = partial(_linked, inside, target), OLDER
    for key in ("M", "T"):
        damages[f"{key} of the one before"] = partial(_copied, files[key], lambda s: s.older), OLDER
        other = partial(_copied, files[key], lambda s: s.other / "checkpoints" / s.newest.name)  # pyright: ignore[reportUnknownLambdaType]
        damages[f"{key} of another training"] = other, OLDER
    layer = "step-000003/layer-0001"
    return damages | {
        "T swapped": (partial(_swapped, "tensors.safetensors"), OLDER),
        "layers swapped": (partial(_swapped, ""), OLDER),
        "T another beside it": (_unread_tensors, NEWEST),
        "layer gone": (partial(_gone, layer), OLDER),
        "layer a file": (partial(_replaced, layer, Path.touch), OLDER),
        "layer empty": (partial(_replaced, layer, Path.mkdir), OLDER),
        "layer link": (partial(_linked, layer, "layer-0002"), OLDER),
        "step gone": (partial(_gone, "step-000003"), OLDER),
        "step a file": (partial(_replaced, "step-000003", Path.touch), OLDER),
        "step empty": (partial(_replaced, "step-000003", Path.mkdir), OLDER),
        "step link": (partial(_linked, "step-000003", "step-000002"), OLDER),
        "step renamed": (lambda s: s.newest.rename(s.newest.with_name("step-000009")), OLDER),
        "step partial": (lambda s: s.newest.rename(s.newest.with_suffix(".tmp")), OLDER),
        "latest gone": (partial(_gone, "latest"), NEWEST),
        "latest garbage": (partial(_edit, "../latest", lambda data: b"\xff\0\x1b"), NEWEST),
        "latest folder": (partial(_replaced, "latest", Path.mkdir), NEWEST),
        "latest pipe": (partial(_replaced, "latest", os.mkfifo), NEWEST),
        "latest endless": (partial(_linked, "latest", "/dev/zero"), NEWEST),
        "all flipped": (_all_flipped, REFUSED),
        "no checkpoints": (lambda s: shutil.rmtree(s.folder / "checkpoints"), REFUSED),
        "checkpoints a file": (partial(_replaced, ".", Path.touch), REFUSED),
        "state partition": (partial(_with_state, {"partition": "abc"}), REFUSED),
        "state layers": (partial(_with_state, {"frozen": [99]}), REFUSED),
        "state cases": (partial(_with_state, {"cases": [1]}), REFUSED),
        "state loss": (partial(_with_state, {"loss": "low"}), REFUSED),
        "state lacks moves": (partial(_with_state, {"moves": "missing"}), REFUSED),
        "state scale": (partial(_with_state, {"loss_scale": {"scale": "x"}}), REFUSED),
    }


DAMAGES = _damages()
OF_RUNS = ["T flip middle", "layers swapped", "all flipped", "state partition"]
EVERYDAY = ["M empty", "M pipe", "M link /dev/zero", "M of another training", "J gone", *OF_RUNS]
EVERYDAY += ["T of the one before", "T another beside it", "latest pipe"]


@pytest.mark.parametrize(
    ("begin", "go_on", "names"),
    mostly_matrix(
        [
            ("train", "resume_each", OF_RUNS),
            ("train", "resume_each", list(DAMAGES)),
            ("loop", "load_each", EVERYDAY),
            ("loop", "load_each", list(DAMAGES)),
        ],
        everyday=[("train", "resume_each", OF_RUNS), ("loop", "load_each", EVERYDAY)],
    ),
)
def test_damaged_checkpoint_is_never_used(
    pool: Pool, tmp_path: Path, begin: str, go_on: str, names: list[str]
) -> None:
    whole, other = tmp_path / "whole", tmp_path / "other"
    whole.mkdir()
    other.mkdir()
    (digest, _) = pool.run(JOBS + begin, 2, config=CONFIG, folder=str(whole))
    pool.run(JOBS + begin, 2, config=CONFIG | {"seed": 5}, folder=str(other))
    shutil.rmtree(whole / "checkpoints/step-000004")
    (whole / "checkpoints/latest").write_text("step-000003")
    folders = [tmp_path / name.replace("/", "_") for name in names]
    for name, folder in zip(names, folders, strict=True):
        shutil.copytree(whole, folder, symlinks=True)
        DAMAGES[name][0](Saved(folder, other))
    given = {"config": CONFIG, "folders": list(map(str, folders))}
    ranks = pool.run(JOBS + go_on, 2, timeout=300.0, **given)
    for name, *each in zip(names, *ranks, strict=True):
        used = DAMAGES[name][1]
        for row in each:
            if used == REFUSED:
                assert row.get("status") == 2, (name, each)
                assert row["text"].isprintable(), (name, each)
            else:
                assert row.get("digest") == digest, (name, each)
        said = [line for line in each[0]["said"] if "resuming from" in line]
        if used != REFUSED and name != "latest gone" and "beside" not in name:
            assert said, (name, each)
            number = 3 if used == NEWEST else 2
            assert all(f"resuming from step-00000{number}" in line for line in said), (name, each)
