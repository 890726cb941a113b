"""Fixtures, time limits and hypothesis profiles of the test suite."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import hypothesis
import pytest
import torch

from tests.harness import run_ranks

_TIME_LIMIT = 180  # seconds for one test; `@pytest.mark.time_limit(seconds)` sets another
_HARD_EXTRA = 60  # more seconds until the process ends, for a test that hangs outside of Python

hypothesis.settings.register_profile(
    "ci", max_examples=10, derandomize=True, deadline=None, database=None, print_blob=True
)
hypothesis.settings.register_profile("nightly", max_examples=300, deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


torch.set_num_threads(1)  # as ranks do: with another split of the work, the oracle would round differently


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "time_limit(seconds): another limit than the default for one test")
    config.addinivalue_line("markers", "gpu: needs a GPU")
    config.addinivalue_line("markers", "slow: takes more than a few seconds")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.path.parent.parts[-1:]:
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that takes too long, with its stack; end the process when even that is not possible."""
    marker = item.get_closest_marker("time_limit")
    limit = marker.args[0] if marker is not None else _TIME_LIMIT

    def expire(*_: object) -> None:
        faulthandler.dump_traceback(all_threads=True)
        pytest.fail(f"not finished after {limit} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, limit)
    faulthandler.dump_traceback_later(limit + _HARD_EXTRA, exit=True)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def run2() -> Callable[..., list[Any]]:
    """`run2(fn, *args)`: `run_ranks` on 2 ranks."""
    return partial(_run_on, 2)


@pytest.fixture
def run4() -> Callable[..., list[Any]]:
    """`run4(fn, *args)`: `run_ranks` on 4 ranks."""
    return partial(_run_on, 4)


def _run_on(world: int, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    return run_ranks(fn, world, *args, **options)
