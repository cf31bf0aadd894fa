"""Lines about ranks that leave and join, and the GPU time of a run."""

from dataclasses import replace

from dynmo.change_events import GrowEvent, ReleaseEvent, RepackEvent, SpeedsEvent
from dynmo.events import FaultEvent, StepResult
from dynmo.report.rank_lines import account_text, rank_account, rank_text, speeds_text

REPACK = RepackEvent(
    2, 1, 4, 2, (4, 1), (2, 1), (4, 4), 1 << 20, 0.25, 0.04, "2 of 4 ranks", ("a:1", "b:2")
)
GROW = GrowEvent(4, 2, 2, 4, (2, 1), (2, 2), (4, 4), 0, 0.5, None, "planned", ("a:3", "b:4"), 6.0)


def step(number: int, seconds: float) -> StepResult:
    return StepResult(number, 1.0, 1.0, 0.0, 0.0, seconds, None, 0.1, (4, 4), 0)


def test_resize_events_have_a_line():
    assert rank_text(REPACK, -0.05) == (
        "went on with 2 of 4 ranks (layers 4+4, 1.0 MiB moved, pause 250 ms; 2 of 4 ranks): a "
        "step takes +4.0% predicted, +5.0% measured"
    )
    resized = replace(REPACK, micro_batch=(3, 1))
    assert "(layers 4+4, micro_batch 3 to 1, 1.0 MiB moved" in rank_text(resized)
    assert rank_text(GROW).startswith(
        "grew from 2 to 4 ranks (layers 4+4 x 2 replicas, 0.0 MiB moved, pause 500 ms; planned)"
    )
    assert rank_text(ReleaseEvent(3, "launcher", "node n3", 1, 1.5)) == "launcher: node n3 (1.5 s)"
    assert rank_text(FaultEvent(3, "nobody came")) == "fault: nobody came"


def test_a_slow_rank_is_named():
    line = speeds_text(SpeedsEvent(5, (1.0, 1.0, 0.5)))
    assert line == "speeds differ: rank 2 at 0.50 of the middle rank's speed"
    assert speeds_text(SpeedsEvent(9, (1.0, 1.0, 1.0))) == "all ranks are equally fast again"


def test_rank_account_counts_gpu_seconds():
    steps = [step(number, 1.0 + number) for number in range(6)]
    account = rank_account(steps, [REPACK, GROW], returned=4.0)
    assert account is not None
    assert account.gpu_seconds == (1 + 2) * 4 + (3 + 4) * 2 + (5 + 6) * 4
    assert account.mean == account.gpu_seconds / 21
    assert (
        account_text(account)
        == "ranks: 3.3 on average; GPU-seconds: 70.0 used in steps, 4.0 returned"
    )


def test_run_without_resizes_has_no_rank_account():
    assert rank_account([step(0, 1.0)], [FaultEvent(0, "nobody came")], returned=0.0) is None
