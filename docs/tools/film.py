"""Draws layers that move between ranks: a film in SVG, from the decisions of a run.

dynmo train benchmarks/data/film.toml
python -m docs.tools.film runs/film     # writes benchmarks/results/film.json
python -m docs.tools.pictures film      # draws docs/pictures/film.svg
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import mean

from docs.tools.figures import RESULTS, result_of
from dynmo.plan.decide import DECISIONS, read_records

FILE = "film.json"
WIDTH, LEFT, TOP, ROW, GAP = 690, 58, 40, 34, 10  # pixels
SECONDS, SHIFT = 2.4, 0.4  # of a frame; share of it in which layers move
TIMES = 4
"""How often the film runs before it stops at its last frame."""
SHADES = ("#dbe7f3", "#f5e3c8", "#d9ecd9", "#efdbe6")
"""Colours of layers, by the rank that has them at first."""


@dataclass(frozen=True)
class Frame:
    """Layers on ranks at a decision.

    Attributes:
        moved: Whether the frame shows the placement that was decided, or the one before.
        counts: Layers of each rank.
        milliseconds: F, B and W of each layer for a microbatch, as the decision has them.
        frozen: Number of frozen layers.
    """

    step: int
    moved: bool
    counts: list[int]
    milliseconds: list[float]
    frozen: int

    @property
    def _ranges(self) -> list[tuple[int, int]]:
        return list(pairwise(accumulate(self.counts, initial=0)))

    @property
    def loads(self) -> list[float]:
        """Milliseconds of each rank."""
        return [sum(self.milliseconds[start:stop]) for start, stop in self._ranges]

    @property
    def idle(self) -> float:
        """Share of time in which ranks wait for the slowest one."""
        return 1 - mean(self.loads) / max(self.loads)

    @property
    def text(self) -> str:
        trained = "all layers train" if not self.frozen else f"{self.frozen} layers are frozen"
        what = "dynmo moves layers" if self.moved else trained
        return f"Step {self.step}: {what}. Ranks wait {self.idle:.0%} of the time."

    def cells(self, scale: float) -> Iterator[tuple[float, int, float]]:
        """The left edge, the top and the width of each layer in pixels."""
        for rank, (start, stop) in enumerate(self._ranges):
            x = float(LEFT)
            for each in self.milliseconds[start:stop]:
                yield x, TOP + rank * (ROW + GAP), each * scale
                x += each * scale


def frames(run: Path) -> Iterator[Frame]:
    """Frames of a run: its start, and each decision to move before and after."""
    for number, record in enumerate(read_records(run / DECISIONS)):
        if number and not record.answer["change"]:
            continue
        layers = record.problem.profile.layers
        step = record.problem.work.step
        milliseconds = [round(1000 * (x.f + x.b + x.w), 2) for x in layers]
        frozen = sum(not x.b and not x.w for x in layers)
        yield Frame(step, False, list(record.now.partition.counts), milliseconds, frozen)
        if record.answer["change"]:
            yield Frame(step, True, list(record.answer["partition"]), milliseconds, frozen)


# -- drawing ---------------------------------------------------------------------------------------


def _keyframes(name: str, states: Iterable[str], shift: float = SHIFT) -> str:
    """Each state stays until the next frame. The change takes `shift` of that frame."""
    values = list(states)
    slot = 100 / (len(values) + 1)  # the last frame stays twice as long
    rules = [f"0%{{{values[0]}}}"]
    for number, (before, after) in enumerate(pairwise(values), start=1):
        if before != after:
            rules.append(f"{number * slot:.3f}%{{{before}}}")
            rules.append(f"{(number + shift) * slot:.3f}%{{{after}}}")
    return f"@keyframes {name}{{{''.join(rules)}100%{{{values[-1]}}}}}"


def _shown(name: str, visible: Iterable[bool]) -> str:
    return _keyframes(name, (f"opacity:{int(each)}" for each in visible), 0.01)


def _place(x: float, y: float) -> str:
    return f"transform:translate({x:.1f}px,{y:.1f}px)"


def film(shown: list[Frame]) -> str:
    """Returns the SVG. It rests at the last frame, also in print and with reduced motion."""
    scale = (WIDTH - LEFT - 8) / max(max(frame.loads) for frame in shown)
    ranks, last = len(shown[0].counts), shown[-1]
    bottom = TOP + ranks * (ROW + GAP)
    seconds = SECONDS * (len(shown) + 1)
    rules: list[str] = []
    body: list[str] = []

    def animated(name: str, keyframes: str) -> str:
        rules.append(keyframes)
        return f"animation-name:{name}"

    first_rank = [rank for rank, count in enumerate(shown[0].counts) for _ in range(count)]
    cells = [list(frame.cells(scale)) for frame in shown]
    for layer, rank in enumerate(first_rank):
        own = [frame[layer] for frame in cells]
        x, y, width = own[-1]
        moves = animated(f"m{layer}", _keyframes(f"m{layer}", (_place(x, y) for x, y, _ in own)))
        widths = _keyframes(f"w{layer}", (f"width:{width:.1f}px" for *_, width in own))
        grows = animated(f"w{layer}", widths)
        freezes = animated(f"f{layer}", _shown(f"f{layer}", (layer < x.frozen for x in shown)))
        box = f'width="{width:.1f}" height="{ROW}"'
        body.append(
            f'<g style="{_place(x, y)};{moves}"><rect {box} fill="{SHADES[rank % len(SHADES)]}" '
            f'style="{grows}"/><g style="opacity:{int(layer < last.frozen)};{freezes}">'
            f'<rect {box} fill="url(#frozen)" style="{grows}"/></g>'
            f'<rect {box} fill="none" stroke="#444" style="{grows}"/>'
            f'<text x="5" y="{ROW - 12}">{layer}</text></g>'
        )
    slowest = [_place(LEFT + max(frame.loads) * scale, 0) for frame in shown]
    line = animated("slowest", _keyframes("slowest", slowest))
    body.append(
        f'<path d="M0 {TOP - 6}V{bottom}" stroke="#b3541e" stroke-width="2" '
        f'stroke-dasharray="5 3" style="{slowest[-1]};{line}"/>'
    )
    for number, frame in enumerate(shown):
        name = f"t{number}"
        told = animated(name, _shown(name, (each is frame for each in shown)))
        style = f"opacity:{int(frame is last)};{told}"
        body.append(f'<text class="told" x="{LEFT}" y="22" style="{style}">{frame.text}</text>')
    for rank in range(ranks):
        body.append(f'<text x="4" y="{TOP + rank * (ROW + GAP) + ROW - 12}">rank {rank}</text>')
    body.append(
        f'<path d="M{LEFT} {bottom + 16}h{20 * scale:.1f}m0 -5v10M{LEFT} {bottom + 11}v10" '
        'stroke="#222" fill="none"/>'
        f'<text x="{LEFT + 20 * scale + 8:.0f}" y="{bottom + 20}">20 ms of a microbatch '
        f'(F, B and W)</text><text x="{LEFT}" y="{bottom + 42}">Hatched: frozen. '
        "Colour: the rank at first. Dashed: the slowest rank.</text>"
    )
    height = bottom + 54
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img"><title>Layers move between {ranks} ranks</title>\n<style>\n'
        "text{font:13px 'DejaVu Sans',Verdana,sans-serif;fill:#111}.told{font-weight:bold}\n"
        f"g,rect,path,text{{animation-duration:{seconds:g}s;animation-iteration-count:{TIMES}}}\n"
        "@media print,(prefers-reduced-motion:reduce){*{animation-name:none!important}}\n"
        + "\n".join(rules)
        + '\n</style>\n<pattern id="frozen" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><path d="M0 0V6" stroke="#777" stroke-width="2"/>'
        "</pattern>\n"
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def draw() -> str:
    return film([Frame(**each) for each in result_of(FILE)["frames"]])


if __name__ == "__main__":
    result = {"frames": [asdict(frame) for frame in frames(Path(sys.argv[1]))]}
    (RESULTS / FILE).write_text(json.dumps(result) + "\n")
