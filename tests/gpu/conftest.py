"""GPU tests under pytest: every rank runs the same session. See `ranks.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from tests.gpu import ranks


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    declared = getattr(metafunc.function, "cases", None)
    if declared is not None:
        name, values = declared
        metafunc.parametrize(name, values, ids=str)


@pytest.fixture(scope="session", autouse=True)
def _process_group() -> Iterator[None]:
    why = ranks.missing()
    if why is not None:
        pytest.skip(why)
    ranks.device()
    yield
    ranks.synchronize()
    dist.destroy_process_group()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[Any]:
    try:
        return (yield)
    except ranks.Skip as reason:
        pytest.skip(str(reason))
