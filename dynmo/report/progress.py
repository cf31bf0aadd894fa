"""Shows the progress of a run: loss, tokens/s, idle ratio, layers per rank.

The line goes to stderr, so that --json has stdout to itself.
"""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from dynmo.change_events import (
    ChangeEvent,
    GrowEvent,
    RebalanceEvent,
    RebalanceResultEvent,
    ReleaseEvent,
    RepackEvent,
    SpeedsEvent,
    TokensEvent,
)
from dynmo.events import (
    CheckpointEvent,
    EvalEvent,
    Event,
    FaultEvent,
    HeldOutEvent,
    PostValidationEvent,
    RollbackEvent,
    StepResult,
)
from dynmo.report.rank_lines import rank_text, speeds_text
from dynmo.report.summary_text import layers_text, new_schedule_text
from dynmo.report.token_lines import evaluation_text, tokens_text


class ProgressLine:
    """Takes events and shows them.

    A terminal gets one live line. Any other output gets a plain line now and then.

    Args:
        name: Name of the run.
        steps: Number of steps of the run.
        console: Console to draw on. The default is stderr.
    """

    def __init__(self, name: str, steps: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._steps, self._name = steps, name
        self._live = self._console.is_terminal
        self._every = max(1, steps // 20)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._live,
        )
        self._task = self._progress.add_task(name, total=steps, figures="")

    def __enter__(self) -> ProgressLine:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def __call__(self, event: Event) -> None:
        match event:
            case StepResult():
                figures = (
                    f"loss {event.loss:.4f}  {event.tokens_per_s:,.0f} tokens/s  idle "
                    f"{event.idle_ratio:.0%}  layers {layers_text(event.layers)}"
                    + (f"  frozen {event.frozen}" if event.frozen else "")
                )
                self._progress.update(self._task, completed=event.step + 1, figures=figures)
                if not self._live and (
                    (event.step + 1) % self._every == 0 or event.step + 1 == self._steps
                ):
                    self._say(f"{self._name} {event.step + 1}/{self._steps}  {figures}")
            case ChangeEvent():
                self._say(f"step {event.step}: {event.what}")
            case SpeedsEvent():
                self._say(f"step {event.step}: {speeds_text(event)}")
            case RebalanceEvent():
                self._say(
                    f"step {event.step}: moved layers {layers_text(event.source)} -> "
                    f"{layers_text(event.target)}{new_schedule_text(event)} in "
                    f"{event.seconds * 1000:.0f} ms ({event.reason})"
                )
            case RebalanceResultEvent():
                self._say(
                    f"step {event.step}: rebalance {event.id} measured: "
                    f"{event.measured_gain:+.1%} of a step saved"
                )
            case RollbackEvent():
                self._say(
                    f"step {event.step}: taken back ({event.what}), {event.seconds * 1000:.0f} ms "
                    "of work thrown away"
                )
            case PostValidationEvent():
                self._say(
                    f"step {event.step}: post-validation {'on' if event.on else 'off'}: "
                    f"{event.reason}"
                )
            case HeldOutEvent():
                self._say(f"held out for evaluations: {event.held_out}")
            case EvalEvent():
                self._say(f"step {event.step + 1}: {evaluation_text(event)}")
            case TokensEvent():
                self._say(f"step {event.step}: {tokens_text(event)}")
            case CheckpointEvent():
                self._say(
                    f"step {event.step + 1}: saved {event.path} ({event.bytes / 2**20:.1f} MiB in "
                    f"{event.seconds:.2f} s)"
                )
            case RepackEvent() | GrowEvent() | ReleaseEvent() | FaultEvent():
                self._say(f"step {event.step}: {rank_text(event)}")
            case _:
                pass

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
