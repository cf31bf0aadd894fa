"""Batches are a pure function of the seed and the step. Corpora have the same bytes every time."""

import os
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynmo.data.batches import Ahead, Batches
from dynmo.data.corpus import SEPARATOR, FileCorpus, check_vocab, open_corpus, stdlib
from dynmo.data.order import Order, windows_of
from dynmo.errors import ConfigError

SEQUENCE = 4


def numbered(windows: int) -> np.ndarray:
    """A corpus whose token is its own position. So a test sees where each token came from."""
    return np.arange(windows * SEQUENCE + 2)


def starts(batches: Batches, steps: int) -> list[int]:
    """The window number of each sequence of the first `steps` steps."""
    inputs = torch.cat([batches.train(step)[0] for step in range(steps)])
    return (inputs.reshape(-1, SEQUENCE)[:, 0] // SEQUENCE).tolist()


def test_targets_are_the_next_tokens():
    batches = Batches(numbered(50), SEQUENCE, global_batch=6, micro_batch=2, seed=0)
    inputs, targets = batches.train(3)
    assert inputs.shape == targets.shape == (3, 2, SEQUENCE)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(targets, inputs + 1)  # in this corpus the next token is the next number
    inputs, targets = batches.held_out(1)
    assert inputs.shape == targets.shape == (2, SEQUENCE)
    assert torch.equal(targets, inputs + 1)


@given(
    windows=st.integers(2, 60),
    micro_batch=st.sampled_from([1, 2, 3, 4, 6, 12]),
    seed=st.integers(0, 2**63 - 1),
    steps=st.permutations(range(8)),
)
def test_batch_depends_only_on_seed_and_step(windows, micro_batch, seed, steps):
    """Steps are requested in order, shuffled, and from a new object."""
    whole = Batches(numbered(windows), SEQUENCE, 12, 12, seed)
    expected = [whole.train(step)[0].reshape(12, SEQUENCE) for step in range(8)]
    split = Batches(numbered(windows), SEQUENCE, 12, micro_batch, seed)
    for step in steps:
        got = split.train(step)[0]
        assert got.shape[1] == micro_batch
        assert torch.equal(got.reshape(12, SEQUENCE), expected[step])
    fresh = Batches(numbered(windows), SEQUENCE, 12, 12, seed)
    assert torch.equal(fresh.train(7)[0].reshape(12, SEQUENCE), expected[7])


@given(windows=st.integers(2, 80), global_batch=st.integers(1, 30), seed=st.integers(0, 100))
def test_an_epoch_has_every_training_window_once(windows, global_batch, seed):
    batches = Batches(numbered(windows), SEQUENCE, global_batch, 1, seed)
    n = batches.windows
    seen = starts(batches, steps=-(-3 * n // global_batch))
    for epoch in range(3):
        assert sorted(seen[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_epochs_and_seeds_are_shuffled_differently():
    def order(seed: int) -> list[int]:
        return starts(Batches(numbered(106), SEQUENCE, 1, 1, seed), 202)

    first = order(0)
    assert first[:101] != list(range(101))
    assert first[:101] != first[101:]
    assert first[:101] != order(1)[:101]
    # Epoch 1 of seed 0 is not epoch 0 of seed 1: the two are separate words of the key.
    assert first[101:] != order(1)[:101]


@given(
    windows=st.integers(8, 80), global_batch=st.sampled_from([2, 4, 6]), seed=st.integers(0, 100)
)
def test_later_epochs_repeat_the_batches_in_another_order(windows, global_batch, seed):
    """A later epoch has the same batches, each once, with the same sequences in order."""
    plain = Order(windows, global_batch, 2, seed)
    order = Order(windows, global_batch, 2, seed, "batches")
    steps = order.windows // global_batch
    epochs = [
        [order.train(epoch * steps + place).tolist() for place in range(steps)]
        for epoch in range(3)
    ]
    assert epochs[0] == [plain.train(step).tolist() for step in range(steps)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    if steps > 20:
        assert epochs[0] != epochs[1] != epochs[2]
    for step in (2 * steps, 0, steps):  # in whatever order it is asked
        assert order.train(step).tolist() == epochs[step // steps][step % steps]
    assert (order.repeats(steps), order.repeats(steps + 1)) == (False, True)


def test_shuffled_windows_rarely_repeat_a_batch():
    """Single sequences repeat in each epoch, but rarely together with the same others."""
    windows = windows_of(20 * SEQUENCE + 2, SEQUENCE)  # 19 to train on
    assert not Order(windows, 2, 2, 0).repeats(1000)
    assert [Order(windows, 2, 1, 0).repeats(steps) for steps in (9, 10)] == [False, True]


def test_batch_larger_than_the_data_is_refused():
    with pytest.raises(ConfigError, match=r"data.shuffle .*19 windows .*train.global_batch = 20"):
        Order(20, 20, 2, 0, "batches")
    whole = Batches(numbered(20), SEQUENCE, 19, 19, 0, "batches").train(3)[0]
    assert whole.shape == (1, 19, SEQUENCE)


def test_epoch_order_has_recorded_values():
    """A run that resumes with another numpy or dynmo must see the same data."""
    batches = Batches(numbered(11), SEQUENCE, 5, 1, seed=7)
    assert starts(batches, 2) == [8, 4, 1, 6, 3, 2, 7, 5, 9, 0]


@given(windows=st.integers(2, 300), micro_batch=st.integers(1, 5))
def test_held_out_tokens_are_never_trained_on(windows, micro_batch):
    batches = Batches(numbered(windows), SEQUENCE, micro_batch, micro_batch, 0)
    seen = [set[int](), set[int]()]
    kinds = (batches.train, batches.windows), (batches.held_out, batches.held_out_windows)
    for tokens, (read, count) in zip(seen, kinds, strict=True):
        for number in range(-(-count // micro_batch)):
            tokens.update(torch.cat(read(number)).flatten().tolist())
        assert len(tokens) == count * SEQUENCE + 1  # so these were all of them
    assert not set.intersection(*seen)
    assert max(seen[1]) == windows * SEQUENCE + 1


def test_one_twentieth_of_the_windows_is_held_out():
    def held(windows: int) -> tuple[int, int]:
        batches = Batches(numbered(windows), SEQUENCE, 1, 1, 0)
        return batches.windows, batches.held_out_windows

    assert held(2) == (1, 1)
    assert held(100) == (95, 5)
    assert held(40_000) == (38_976, 1024)


def test_held_out_batches_repeat_and_do_not_depend_on_the_seed():
    one, other = (Batches(numbered(200), SEQUENCE, 4, 4, seed) for seed in (1, 2))
    assert one.held_out_windows == 10
    assert torch.equal(one.held_out(2)[0], other.held_out(2)[0])
    assert torch.equal(one.held_out(0)[0][:2], one.held_out(2)[0][2:])  # windows 8, 9, then 0, 1


def test_short_corpus_error_names_the_bytes_needed():
    Batches(numbered(2), SEQUENCE, 1, 1, 0)
    with pytest.raises(ConfigError, match=r"9 tokens, model.sequence = 4 .*10"):
        Batches(numbered(2)[:-1], SEQUENCE, 1, 1, 0)


def test_byte_vocabulary_must_be_256():
    check_vocab(256)
    with pytest.raises(ConfigError, match=r"model.vocab = 255: .* set it to 256"):
        check_vocab(255)


def test_stdlib_corpus_is_deterministic_and_bounded():
    corpus = open_corpus("stdlib")
    assert isinstance(corpus, np.ndarray)
    assert corpus.dtype == np.uint8
    assert 2**20 < len(corpus) <= 16 * 2**20
    assert np.array_equal(corpus, open_corpus("stdlib")[:])
    assert b"class Fraction" in corpus.tobytes()
    assert not corpus.flags.writeable


def test_stdlib_corpus_excludes_installed_packages(tmp_path):
    names = ["b.py", "a/z.py", "a.py", "c.txt", "site-packages/p/x.py", "test/t.py"]
    names += ["a/tests/t.py", "idlelib/i.py", "__pycache__/a.py", "_sysconfigdata__linux.py"]
    for name in [*names, "config-3.11/python-config.py", "sitecustomize.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"<{name}>")
    assert stdlib(tmp_path).tobytes() == SEPARATOR.join([b"<a.py>", b"<a/z.py>", b"<b.py>", b""])
    assert stdlib(tmp_path, limit=8).tobytes() == b"<a.py>" + SEPARATOR + b"<"


def test_missing_stdlib_sources_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r'data.source = "stdlib"'):
        stdlib(tmp_path)


def test_file_corpus_is_read_unchanged(tmp_path):
    (tmp_path / "text").write_bytes(b"a\x00\xff\n")
    corpus = open_corpus(f"file:{tmp_path / 'text'}")
    assert len(corpus) == 4
    assert corpus[:].tobytes() == b"a\x00\xff\n"
    assert corpus[-2:].tobytes() == corpus[2:9].tobytes() == b"\xff\n"


def test_truncated_file_is_an_error(tmp_path):
    """The process gets an error and no signal. The remaining data can still be read."""
    (tmp_path / "text").write_bytes(bytes(range(100)))
    batches = Batches(open_corpus(f"file:{tmp_path / 'text'}"), SEQUENCE, 2, 1, 0)
    before = batches.held_out(0)
    os.truncate(tmp_path / "text", 99)
    assert torch.equal(batches.held_out(0)[0], before[0])
    os.truncate(tmp_path / "text", 50)
    with pytest.raises(ConfigError, match=r'"file:.*text": .*100 bytes .*50'):
        batches.held_out(0)


def test_sources_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r'data.source = "file:.*none"'):
        FileCorpus(tmp_path / "none")
    with pytest.raises(ConfigError, match="Is a directory"):
        FileCorpus(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="empty"):
        FileCorpus(tmp_path / "empty")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a regular file"):
        FileCorpus(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="unknown"):
        open_corpus("hf:x")


def test_share_is_held_out():
    assert [Order(40, 4, 2, 0, share=share).held_out_windows for share in (None, 0.25, 0.999)] == [
        2,
        10,
        39,
    ]
    assert Order(2, 1, 1, 0, share=0.9).windows == 1
    whole = Order(40, 4, 2, 0, share=0)
    assert sorted(n for step in range(10) for n in whole.train(step).flat) == [*range(40)]
    assert Batches(numbered(40), SEQUENCE, 4, 2, 0, held_out=0.25).windows == 30


def test_text_of_its_own_is_held_out():
    """All windows of the first text train. Those of the other one are evaluated, each once."""
    batches = Batches(numbered(6), SEQUENCE, 6, 2, 0, held_out=1000 + numbered(3))
    assert sorted(starts(batches, 1)) == list(range(6))
    inputs, targets = batches.held_out(0)
    more = batches.held_out(1)[0]
    assert torch.equal(targets, inputs + 1)
    found = torch.cat([inputs, more])[:, 0].tolist()
    assert sorted(found[:3]) == [1001, 1005, 1009]
    assert found[3] == found[0]
    with pytest.raises(ConfigError, match=r"data\.held_out has 5 tokens"):
        Batches(numbered(6), SEQUENCE, 6, 2, 0, held_out=np.arange(5))


def test_each_number_is_made_once_and_ahead() -> None:
    made, third = list[int](), threading.Event()

    def make(number: int) -> int:
        made.append(number)
        if number == 5:
            third.set()
        return 10 * number

    ahead = Ahead(make, depth=2)
    assert ahead.take(3) == 30
    assert third.wait(10), "the next two are made without being asked for"
    assert ahead.take(4) == 40
    assert ahead.take(4) == 40
    assert ahead.error(5) is None
    assert ahead.waited > 0
    ahead.close()
    assert made[:3] == [3, 4, 5]
    assert len(set(made)) == len(made)


def test_error_is_known_before_its_number_is_taken() -> None:
    def make(number: int) -> int:
        if number == 2:
            raise ValueError("no sample")
        return number

    ahead = Ahead(make)
    assert ahead.take(1) == 1
    assert str(ahead.error(2)) == "no sample"
    with pytest.raises(ValueError, match="no sample"):
        ahead.take(2)
    ahead.close()
