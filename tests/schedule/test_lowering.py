"""Programs send and receive every message exactly once, in order."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given

from dynmo.errors import ScheduleError
from dynmo.schedule.catalogue import SCHEDULES, chunks_of, make
from dynmo.schedule.lowering import (
    Begun,
    Channel,
    Compute,
    Direction,
    Instruction,
    Program,
    Receive,
    Send,
    Verdict,
    check,
    check_again,
    fold,
    fuse,
    lower,
    lower_forward,
    routes,
)
from dynmo.schedule.op import Kind, Op, Schedule, dependencies, validate
from tests.schedule.samples import BY_HAND, apart, from_text, schedules

CASES = [(name, p, m, f) for name, p, m in product(BY_HAND, (1, 2, 4), (1, 3, 8)) for f in range(p)]

VSHAPE = """# by-hand  ranks=2 microbatches=2 placement=0,1,1,0
0 | 0F0 0F1 3F0 3B0 3F1 3B1 0B0 0W0 3W0 0B1 0W1 3W1
1 | 1F0 2F0 1F1 2F1 2B0 1B0 2W0 2B1 1B1 1W0 2W1 1W1
"""
LOOPED = """# by-hand  ranks=2 microbatches=2 placement=0,1,0,1
0 | 0F0 0F1 2F0 2F1 2BW0 0BW0 2BW1 0BW1
1 | 1F0 1F1 3F0 3BW0 3F1 3BW1 1BW0 1BW1
"""


def draw(program: Program) -> str:
    """A program as the lowering's docstring shows it."""

    def cell(instruction: Instruction) -> str:
        if isinstance(instruction, Compute):
            return f"{instruction.op.kind}{instruction.op.microbatch}"
        if isinstance(instruction, Verdict):
            return "?"
        channel, _, j = instruction
        kind = "F" if channel.direction is Direction.ACTIVATION else "B"
        return f"<{kind}{j}" if isinstance(instruction, Receive) else f"{kind}{j}>{channel.target}"

    return " ".join(map(cell, program.instructions))


def play(schedule: Schedule, programs: tuple[Program, ...]) -> None:
    """Every op must find its inputs, and every message is used exactly once."""
    schedule = fuse(schedule)
    queues: defaultdict[Channel, list[int]] = defaultdict(list)
    position, done = [0] * len(programs), set[Op]()
    taken: set[tuple[Direction, int, int]] = set()
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while position[rank] < len(program.instructions):
                instruction = program.instructions[position[rank]]
                if isinstance(instruction, Compute):
                    op = instruction.op
                    direction = Direction.ACTIVATION if op.kind is Kind.F else Direction.GRADIENT
                    for before, _ in dependencies(schedule, op):
                        if op.kind is Kind.F and before.stage > op.stage:
                            continue  # a credit, not data
                        if schedule.stage_ranks[before.stage] == rank:
                            assert before in done, f"{op} before {before}"
                        else:
                            assert (direction, op.stage, op.microbatch) in taken
                    done.add(op)
                elif isinstance(instruction, Send):
                    queues[instruction.channel].append(instruction.microbatch)
                elif isinstance(instruction, Receive) and queues[instruction.channel]:
                    assert queues[instruction.channel].pop(0) == instruction.microbatch
                    key = (instruction.channel.direction, instruction.stage, instruction.microbatch)
                    assert key not in taken
                    taken.add(key)
                elif isinstance(instruction, Receive):
                    break
                position[rank] += 1
                moved = True
    assert position == [len(p.instructions) for p in programs]
    assert not any(queues.values())
    assert done == {op for row in schedule.ops for op in row}


def messages(programs: tuple[Program, ...]) -> dict[Channel, tuple[list[int], list[int]]]:
    """Channel -> microbatches sent and taken, in order."""
    out: dict[Channel, tuple[list[int], list[int]]] = {}
    for program in programs:
        for instruction in program.instructions:
            if isinstance(instruction, Send | Receive):
                channel, is_taken = instruction.channel, isinstance(instruction, Receive)
                assert program.rank == (channel.target if is_taken else channel.source)
                out.setdefault(channel, ([], []))[is_taken].append(instruction.microbatch)
    return out


def test_programs_match_the_example_in_the_docstring() -> None:
    """Also with verdicts, where F1 is on its way to rank 1 at its verdict."""
    drawn = [draw(program) for program in lower(make("zb-h1", 2, 2))]
    assert drawn == ["F0 F0>1 F1 F1>1 <B0 BW0 <B1 BW1", "<F0 F0 B0 B0>0 <F1 F1 B1 B1>0 W0 W1"]
    programs = lower(make("zb-h1", 2, 2), post_validation=True)
    assert draw(programs[0]) == "F0 F0>1 F1 F1>1 ? <B0 BW0 <B1 BW1"
    assert draw(programs[1]) == "<F0 F0 ? B0 B0>0 <F1 F1 B1 B1>0 W0 W1"
    assert cut(programs[1])[1] == Verdict((Begun(DOWN, 2, 1),))


@pytest.mark.parametrize(("name", "p", "m", "frozen"), CASES)
def test_every_message_is_sent_and_taken_in_order(name: str, p: int, m: int, frozen: int) -> None:
    programs = lower(make(name, p, m, first_trainable=frozen))
    by_channel = messages(programs)
    activations = {Channel(b, Direction.ACTIVATION, b, b + 1) for b in range(p - 1)}
    # A frozen prefix of stages 0 .. frozen - 1: no gradient ever crosses into it.
    gradients = {Channel(b, Direction.GRADIENT, b + 1, b) for b in range(frozen, p - 1)}
    assert set(by_channel) == activations | gradients
    assert all(sent == got == list(range(m)) for sent, got in by_channel.values())
    assert {c for program in programs for c in program.depth} == set(by_channel)
    play(make(name, p, m, first_trainable=frozen), programs)


@given(schedules())
def test_any_schedule_lowers(schedule: Schedule) -> None:
    programs = lower(schedule)
    play(schedule, programs)
    for program in programs:
        assert program.stages == schedule.stages_of(program.rank)
        # Stages on one rank need no channel.
        assert all(c.source != c.target for c in program.depth)
        assert set(program.incoming) | set(program.outgoing) == set(program.depth)


@given(schedules())
def test_fuse_merges_b_and_w_on_the_first_trainable_stage(schedule: Schedule) -> None:
    """Other stages keep B and W apart, and the set of ops stays the same."""
    fused = fuse(schedule)
    validate(fused)
    assert apart(fused).ops == apart(schedule).ops
    for before, after in zip(schedule.ops, fused.ops, strict=True):
        assert all(s == schedule.first_trainable for op, s, j in set(after) - set(before))
        for one, two in pairwise(after):
            kept_apart = (one.kind, two.kind) == (Kind.B, Kind.W) and one[1:] == two[1:]
            assert not (kept_apart and one.stage == schedule.first_trainable)


@pytest.mark.parametrize(("text", "channels"), [(VSHAPE, 4), (LOOPED, 6)])
def test_several_stages_per_rank_have_the_expected_channels(text: str, channels: int) -> None:
    schedule = from_text(text)
    programs = lower(schedule)
    play(schedule, programs)
    by_channel = messages(programs)
    assert len(by_channel) == channels
    assert all(sent == got == [0, 1] for sent, got in by_channel.values())
    if schedule.stage_ranks == (0, 1, 1, 0):
        assert not any(c.boundary == 1 for c in by_channel), "stages 1 and 2 hand over in memory"


def test_forward_only_programs_have_no_backward() -> None:
    programs = lower_forward((0, 1, 2), 3, 4)
    computed = [i for p in programs for i in p.instructions if isinstance(i, Compute)]
    assert {i.op.kind for i in computed} == {Kind.F}
    assert set(messages(programs)) == {Channel(b, Direction.ACTIVATION, b, b + 1) for b in (0, 1)}
    # As many credits as ranks hold evaluation back.
    assert {d for p in programs for d in p.depth.values()} == {3}


def test_channel_depths_follow_credits_and_order() -> None:
    """Only the order of the schedule limits a trainable stage."""
    schedule = make("1f1b", 4, 9, first_trainable=2)
    depth = lower(schedule)[1].depth
    assert depth == {Channel(b, Direction.ACTIVATION, b, b + 1): 4 for b in (0, 1)}
    assert set(lower(schedule)[3].depth.values()) == {9}
    assert set(lower(replace(schedule, credits=1))[1].depth.values()) == {1}


# Programs by hand, to see what `check` sees.

DOWN, ACROSS = Channel(0, Direction.ACTIVATION, 0, 1), Channel(2, Direction.ACTIVATION, 0, 1)
BACK = Channel(0, Direction.GRADIENT, 1, 0)
# Two messages on one channel before the one that rank 1 takes first.
SENDS = [Send(DOWN, 0, 0), Send(DOWN, 0, 1), Send(ACROSS, 2, 0)]
TAKES = [Receive(ACROSS, 3, 0), Receive(DOWN, 1, 0), Receive(DOWN, 1, 1)]


def programs(depth: int, *rows: Sequence[Instruction]) -> tuple[Program, ...]:
    depths = dict.fromkeys((DOWN, ACROSS, BACK), depth)
    return tuple(Program(rank, (rank,), 2, tuple(row), depths) for rank, row in enumerate(rows))


@pytest.mark.parametrize(
    ("depth", "first", "second", "message"),
    [
        (1, SENDS, TAKES, "microbatch 1 on the activations from rank 0 to rank 1"),
        (
            2,
            [Receive(BACK, 0, 0), Send(DOWN, 0, 0)],
            [Receive(DOWN, 1, 0), Send(BACK, 1, 0)],
            "microbatch 0 on the gradients from rank 1 to rank 0",
        ),
        (2, SENDS[:2], TAKES[2:], r"message 0 on .* comes where microbatch 1 is waited for"),
        (2, SENDS[:2], TAKES[1:2], r"1 messages on .* are never taken"),
    ],
    ids=["depth", "circle", "taken", "left"],
)
def test_programs_that_would_hang_are_detected(
    depth: int, first: list[Instruction], second: list[Instruction], message: str
) -> None:
    check(programs(2, SENDS, TAKES))
    with pytest.raises(ScheduleError, match=message):
        check(programs(depth, first, second))


# Post-validation.


def cut(program: Program) -> tuple[list[Instruction], Verdict, list[Instruction]]:
    """The instructions before the verdict, the verdict, and those after it."""
    row = list(program.instructions)
    ((at, verdict),) = [(i, x) for i, x in enumerate(row) if isinstance(x, Verdict)]
    return row[:at], verdict, row[at + 1 :]


def holds(schedule: Schedule) -> None:
    """Verdicts change nothing else, and no B or W runs before them."""
    plain, programs = lower(schedule), lower(schedule, post_validation=True)
    heads: set[Op] = set()
    sent: Counter[Channel] = Counter()
    taken: Counter[Channel] = Counter()
    for before, program in zip(plain, programs, strict=True):
        head, _, tail = cut(program)
        assert tuple(head + tail) == before.instructions
        heads |= {i.op for i in head if isinstance(i, Compute)}
        sent.update(i.channel for i in head if isinstance(i, Send))
        taken.update(i.channel for i in head if isinstance(i, Receive))
    assert all(op.kind is Kind.F for op in heads)
    fused = fuse(schedule)
    # (A credit, of a later stage, holds the sending of a message back, not the F before it.)
    needed = {d.op for op in heads for d in dependencies(fused, op) if d.op.stage <= op.stage}
    assert needed <= heads, "needs what comes after a verdict"
    for program in programs:
        assert {b.channel: (b.sent, b.taken) for b in cut(program)[1].begun} == {
            c: (sent[c], taken[c]) for c in program.incoming
        }
    play(schedule, programs)


@given(schedules())
def test_verdicts_of_any_schedule_are_consistent(schedule: Schedule) -> None:
    holds(schedule)


@pytest.mark.parametrize(("name", "p"), list(product(SCHEDULES, (1, 2, 4))))
def test_verdicts_come_as_late_as_possible(name: str, p: int) -> None:
    """The op after the verdict is the first B or W of the rank, or depends on one."""
    schedule = make(name, p, 8)
    holds(schedule)
    for program in lower(schedule, post_validation=True):
        head, _, tail = cut(program)
        assert any(isinstance(i, Compute) for i in head), "the warm-up overlaps"
        assert isinstance(tail[0], Receive) or (
            isinstance(tail[0], Compute) and tail[0].op.kind is not Kind.F
        )


def test_forward_only_rank_runs_ahead_by_its_credits() -> None:
    """Rank 0 is frozen and has four credits. Rank 1 takes three messages before its verdict."""
    head, _, tail = cut(lower(make("1f1b", 4, 12, first_trainable=1), post_validation=True)[0])
    assert sum(isinstance(i, Send) for i in head) == 3 + 4
    assert isinstance(tail[0], Send)


def test_verdict_routes_follow_the_placement() -> None:
    assert routes((0, 1, 2)) == ((0, 1, 2), (2, 1, 0))
    assert routes((0, 1, 2, 2, 1, 0)) == ((0, 1, 2), (0, 1, 2))
    assert routes((0, 1, 0, 1)) == ((0, 1), (1, 0))


def test_wrong_number_of_discarded_messages_is_detected() -> None:
    """With one too few a rank would take an old message, with one too many wait for ever."""
    programs = lower(make("zb-h1", 2, 2), post_validation=True)
    check_again(programs)
    for sent, message in (
        (1, r"message 1 on the activations .* comes where microbatch 0 is waited for"),
        (3, "comes where|for ever"),
    ):
        head, _, tail = cut(programs[1])
        wrong = replace(programs[1], instructions=(*head, Verdict((Begun(DOWN, sent, 1),)), *tail))
        with pytest.raises(ScheduleError, match=message):
            check_again((programs[0], wrong))


def test_verdict_after_a_dependent_gradient_is_detected() -> None:
    """Rank 1 sends that gradient only after its own verdict, which comes from rank 0."""
    schedule = make("zb-v", 2, 2)
    programs = list(lower(schedule, post_validation=True))
    head, verdict, tail = cut(programs[0])
    # The first gradient that is received on rank 0: rank 1 sends it after its verdict, which rank 0
    # hands on after its own.
    after = 1 + next(
        i
        for i, x in enumerate(tail)
        if isinstance(x, Receive) and x.channel.direction is Direction.GRADIENT
    )
    moved = (*head, *tail[:after], verdict, *tail[after:])
    programs[0] = replace(programs[0], instructions=moved)
    with pytest.raises(ScheduleError, match="would wait for ever"):
        check_again(tuple(programs))


def test_compute_instructions_name_the_target_of_results() -> None:
    """Rank 0 holds stages 0 and 3, and rank 1 holds stages 1 and 2. Stage 0 is frozen."""
    text = "# by-hand  ranks=2 microbatches=1 placement=0,1,1,0 first_trainable=1\n"
    rows = "0 | 0F0 3F0 3B0 3W0\n1 | 1F0 2F0 2B0 1B0 2W0 1W0\n"
    said = [
        {f"{i.op.stage}{i.op.kind}": i[1:] for i in program.instructions if isinstance(i, Compute)}
        for program in lower(from_text(text + rows))
    ]
    none, last = (False, None, False), (True, None, False)
    assert said[0] == {"0F": (False, 1, False), "3F": last, "3B": (False, 2, False), "3W": none}
    assert said[1].pop("2W") == said[1].pop("1W") == none
    forwards = {"1F": (True, 2, True), "2F": (True, 3, False)}
    assert said[1] == forwards | {"2B": (True, 1, True), "1B": last}


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_varying_boundary_marks_its_channels(schedule: str) -> None:
    """Both directions vary, on both ranks. No channel varies by default."""
    one = make(schedule, 2, 4)
    for program in lower(one, varying=[0]):
        assert program.varying == {c for c in program.depth if c.boundary == 0}
        assert program.varying
    assert not any(program.varying for program in lower(one))
    for program in lower_forward(one.stage_ranks, 2, 3, varying=[0]):
        assert {channel.direction for channel in program.varying} == {Direction.ACTIVATION}


# Folded onto one rank.


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_folds_onto_one_rank(name: str, first: int) -> None:
    schedule = make(name, 3, 6, first_trainable=first)
    folded = fold(schedule)
    validate(folded)
    assert folded.stage_ranks == (0,) * 3 * chunks_of(name)
    (row,) = folded.ops
    by_rank: defaultdict[int, list[Op]] = defaultdict(list)
    for op in row:
        by_rank[schedule.stage_ranks[op.stage]].append(op)
    assert tuple(tuple(by_rank[rank]) for rank in range(3)) == fuse(schedule).ops
    # Ops that several ranks wait for stand before them, the credits of a frozen prefix too.
    done = set[Op]()
    for op in row:
        assert all(d.op in done for d in dependencies(fuse(schedule), op))
        done.add(op)


def test_folded_schedule_matches_the_drawing() -> None:
    folded = fold(make("zb-h1", 2, 2))
    assert str(folded).splitlines()[1:] == ["0 | 0F0 0F1 1F0 1B0 0BW0 1F1 1B1 0BW1 1W0 1W1"]
    assert from_text(str(folded)) == folded


def test_folded_schedule_lowers_to_a_program_without_messages() -> None:
    (program,) = lower(fold(make("zb-h1", 4, 8)))
    assert all(isinstance(i, Compute) for i in program.instructions)
    assert (program.stages, program.depth) == ((0, 1, 2, 3), {})
