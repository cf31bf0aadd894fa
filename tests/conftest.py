"""Fixtures of all tests.

CPU threads are those of one rank, and one pool of ranks serves the whole session.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis.database import DirectoryBasedExampleDatabase

from dynmo.elastic.launcher.environment import malloc_settings
from tests.pool import Pool

LATER = ("matrix", "docs", "browser", "clusters")
"""Markers of tests that `make test` leaves out."""
SECOND_POOL = {"pipeline", "train"}

# Imports make many objects and no garbage.
gc.disable()

# The two processes of `make test` keep the memory that tensors free, as ranks do. Fresh pages take
# a tenth of the time.
os.environ |= malloc_settings()

# Runs share their machine, so a slow example says nothing about the code. Each run draws a few new
# examples, and those that failed once come first. `make matrix` draws many.
database = DirectoryBasedExampleDatabase(".hypothesis/examples")
common = settings(deadline=None, derandomize=False, database=database, print_blob=True)
settings.register_profile("dynmo", common, max_examples=15)
settings.register_profile("matrix", common, max_examples=200)
settings.load_profile("dynmo")

# Measurements on this machine that are kept for later runs would end up in the user's own files.
# The pool's ranks inherit this setting too.
os.environ["DYNMO_CACHE"] = tempfile.mkdtemp(prefix="dynmo-test-cache-")
os.environ["HF_DATASETS_CACHE"] = os.environ["DYNMO_CACHE"] + "/datasets"
atexit.register(shutil.rmtree, os.environ["DYNMO_CACHE"], ignore_errors=True)

# A shell's background job ignores Ctrl-C, and so would every run that a test starts from one.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four ranks that stay up for the session."""
    workers = Pool(4)
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def small_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama of 10 layers, with a tokenizer of 300 tokens."""
    folder = tmp_path_factory.mktemp("models") / "small-llama"
    script = Path(__file__).parents[1] / "examples" / "make_small_llama.py"
    with mock.patch.object(sys, "argv", [str(script), str(folder)]):
        runpy.run_path(str(script))
    return folder


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="where tests marked gpu run (cpu: a dry run of them)",
    )


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests marked gpu without their device, and tests that `make test` leaves out.

    The latter stay if `-m` is given. Tests with ranks go to one of xdist's processes, so that there
    is one pool. Some folders go to the other, which would have too little to do.
    """
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if "pool" in fixtures:
            second = not SECOND_POOL.isdisjoint(item.path.parts)
            item.add_marker(pytest.mark.xdist_group("more ranks" if second else "ranks"))
    unwanted: set[str] = set() if config.option.markexpr else {*LATER}
    if config.getoption("--gpu-device") == "cuda" and any(
        item.get_closest_marker("gpu") for item in items
    ):
        import torch

        if not torch.cuda.is_available():
            unwanted.add("gpu")
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        (left_out if any(item.get_closest_marker(name) for name in unwanted) else kept).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def pytest_collection_finish() -> None:
    """Collects garbage again, but never looks at what the imports made."""
    gc.freeze()
    gc.enable()
