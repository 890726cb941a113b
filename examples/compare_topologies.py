"""Run the same job on four topologies and show that they are the same job.

    python examples/compare_topologies.py

One process, GTP alone, TP x GTP and data parallelism x GTP start from the same weights, read the same
global batches and take the same 20 steps in fp32. Only the order of the sums differs, so the losses may
differ by rounding and no more: the exit code is 1 if any loss is further than 1e-3 from the one-process
run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

TRAIN_SCRIPT = Path(__file__).with_name("train_lm.py")
TOLERANCE = 1e-3
TIME_LIMIT_SECONDS = 600


@dataclass(frozen=True)
class Topology:
    """One way to spread the job over processes."""

    name: str
    processes: int
    tensor_parallel_size: int
    num_weight_shards: int

    @property
    def readers(self) -> int:
        """Coordinates that read data of their own: dp x gtp_remat."""
        return self.processes // self.tensor_parallel_size


@dataclass(frozen=True)
class Outcome:
    """What one run reported."""

    losses: list[float]
    eval_loss: float
    bytes_per_rank: int
    seconds: float


# The first one is the reference.
TOPOLOGIES = (
    Topology("1 process", processes=1, tensor_parallel_size=1, num_weight_shards=1),
    Topology("gtp_remat=4", processes=4, tensor_parallel_size=1, num_weight_shards=4),
    Topology("tp=2 x gtp_remat=2", processes=4, tensor_parallel_size=2, num_weight_shards=4),
    Topology("dp=2 x gtp_remat=2", processes=4, tensor_parallel_size=1, num_weight_shards=2),
)


def run(topology: Topology, args: argparse.Namespace, directory: Path) -> Outcome:
    """Run the training script on one topology, in processes of its own."""
    if args.global_batch % topology.readers:
        raise ValueError(f"--global-batch {args.global_batch} does not divide among {topology.readers} readers")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(topology.processes)]
    command = [
        sys.executable,
        *(launcher if topology.processes > 1 else []),
        str(TRAIN_SCRIPT),
        f"--tensor-parallel-size={topology.tensor_parallel_size}",
        f"--num-weight-shards={topology.num_weight_shards}",
        f"--micro-batch-size={args.global_batch // topology.readers}",
        f"--steps={args.steps}",
        f"--hidden={args.hidden}",
        f"--layers={args.layers}",
        f"--seed={args.seed}",
        "--eval-interval=0",
        f"--output-dir={directory}",
    ]
    start = time.perf_counter()
    # One thread per process everywhere: more would change the order of the sums in one row of the table only.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_SECONDS)
    if result.returncode != 0:
        raise RuntimeError(f"{topology.name}: {' '.join(command)} failed\n{result.stdout}\n{result.stderr}")
    metrics = json.loads((directory / "metrics.json").read_text())
    return Outcome(
        losses=[record["loss"] for record in metrics["steps"]],
        eval_loss=metrics["evals"][-1]["loss"],
        bytes_per_rank=metrics["configuration"]["bytes_per_rank"],
        seconds=time.perf_counter() - start,
    )


def difference(outcome: Outcome, reference: Outcome) -> float:
    """The largest distance between two loss curves, the evaluation at their end included."""
    pairs = zip([*outcome.losses, outcome.eval_loss], [*reference.losses, reference.eval_loss], strict=True)
    distances = [abs(a - b) for a, b in pairs]
    # `max` would skip a loss that is not a number.
    return max(distances) if all(map(math.isfinite, distances)) else math.inf


def print_row(*cells: str) -> None:
    widths = (20, 9, 7, 10, 10, 10, 12, 10, 7)
    print(
        "  ".join(
            f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    print_row("topology", "processes", "batch", "KiB/rank", "first", "last", "eval", "max diff", "s")
    outcomes: list[Outcome] = []
    worst = 0.0
    with tempfile.TemporaryDirectory() as directory:
        for number, topology in enumerate(TOPOLOGIES):
            outcome = run(topology, args, Path(directory) / str(number))
            outcomes.append(outcome)
            apart = difference(outcome, outcomes[0])
            worst = max(worst, apart)
            print_row(
                topology.name,
                str(topology.processes),
                f"{args.global_batch // topology.readers} x {topology.readers}",
                f"{outcome.bytes_per_rank / 2**10:,.1f}",
                f"{outcome.losses[0]:.6f}",
                f"{outcome.losses[-1]:.6f}",
                f"{outcome.eval_loss:.6f}",
                f"{apart:.1e}",
                f"{outcome.seconds:.1f}",
            )
    agree = worst <= TOLERANCE
    print(f"{'agree' if agree else 'DISAGREE'}: largest difference {worst:.1e}, tolerance {TOLERANCE:.0e}")
    return 0 if agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
