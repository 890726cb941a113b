"""Runs the GPU tests without pytest: `tools/ranks_on_one_gpu.sh 4 python -m tests.gpu.run [-k WORD] [--device cpu]`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch.distributed as dist

from tests.gpu import ranks


def tests_of(module: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Every test of a module with each of its cases."""
    for name, test in vars(importlib.import_module(f"tests.gpu.{module}")).items():
        if not name.startswith("test_"):
            continue
        declared = getattr(test, "cases", None)
        if declared is None:
            yield f"{module}.{name}", test
            continue
        argument, values = declared
        for value in values:
            yield f"{module}.{name}[{value}]", lambda test=test, given={argument: value}: test(**given)  # type: ignore[misc]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", dest="word", default="", help="only tests whose name has this word")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cpu: over gloo, what has a meaning there")
    parser.add_argument("-x", dest="stop", action="store_true", help="end at the first failure")
    options = parser.parse_args()
    if options.device:
        os.environ["TORCH_GTP_TEST_DEVICE"] = options.device
    why = ranks.missing()
    if why is not None:
        print(f"skipped: {why}")
        return 0
    ranks.device()
    counts = {"passed": 0, "skipped": 0, "failed": 0}
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for name, test in tests_of(path.stem):
            if options.word not in name:
                continue
            outcome = _run(name, test)
            counts[outcome] += 1
            if options.stop and outcome == "failed":
                break
    _say(", ".join(f"{number} {outcome}" for outcome, number in counts.items()))
    ranks.synchronize()
    dist.destroy_process_group()
    return 1 if counts["failed"] or not counts["passed"] else 0


def _run(name: str, test: Callable[[], None]) -> str:
    _say(f"{name} ...", end=" ")
    start = time.monotonic()
    try:
        test()
        outcome, details = "passed", ""
    except ranks.Skip as reason:
        outcome, details = "skipped", f": {reason}"
    except Exception as error:
        outcome, details = "failed", f"\n{error}"
    _say(f"{outcome} in {time.monotonic() - start:.1f} s{details}")
    return outcome


def _say(text: str, end: str = "\n") -> None:
    if dist.get_rank() == 0:
        print(text, end=end, flush=True)


if __name__ == "__main__":
    sys.exit(main())
