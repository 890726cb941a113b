"""What a run tells: a progress bar, and at the end ``metrics.json`` and a picture of the loss."""

from __future__ import annotations

import json
import resource
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from tqdm import tqdm


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step."""

    step: int
    loss: float
    grad_norm: float
    tokens_per_second: float
    memory_bytes: int


@dataclass(frozen=True)
class EvalRecord:
    """The loss on held-out text after ``step`` steps."""

    step: int
    loss: float


def peak_memory(device: torch.device) -> int:
    """Bytes: allocated on a GPU; on a CPU, resident in this process, interpreter and libraries included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class RunReport:
    """Collects records on every rank; shows and writes them on one."""

    def __init__(self, *, first_step: int, last_step: int, visible: bool) -> None:
        self.steps: list[StepRecord] = []
        self.evals: list[EvalRecord] = []
        self._visible = visible
        self._bar = tqdm(
            total=last_step,
            initial=first_step,
            desc="train",
            unit="step",
            mininterval=0.5,  # In a log file every refresh is a line.
            disable=not visible,
        )

    def __enter__(self) -> RunReport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def add_step(self, record: StepRecord) -> None:
        """Record one step and move the bar."""
        self.steps.append(record)
        self._bar.set_postfix_str(
            f"loss {record.loss:.3f}, grad {record.grad_norm:.2f}, {record.tokens_per_second:,.0f} tok/s, "
            f"{record.memory_bytes / 2**20:,.0f} MiB",
            refresh=False,
        )
        self._bar.update()

    def add_eval(self, record: EvalRecord) -> None:
        """Record one evaluation and print it above the bar."""
        self.evals.append(record)
        if self._visible:
            self._bar.write(f"step {record.step}: eval loss {record.loss:.4f}")

    def write(self, directory: Path, configuration: dict[str, Any]) -> None:
        """Write ``metrics.json`` and ``loss.png``."""
        if not self._visible:
            return
        directory.mkdir(parents=True, exist_ok=True)
        metrics = {
            "configuration": configuration,
            "steps": [asdict(record) for record in self.steps],
            "evals": [asdict(record) for record in self.evals],
        }
        (directory / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
        self._draw(directory / "loss.png", configuration["title"])

    def _draw(self, path: Path, title: str) -> None:
        # Here, and not above: one rank draws, and the others start a second earlier.
        import matplotlib

        matplotlib.use("Agg")  # Draw into a file: most machines that train have no display.
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        axes.plot([r.step for r in self.steps], [r.loss for r in self.steps], label="train", linewidth=1.2)
        axes.plot([r.step for r in self.evals], [r.loss for r in self.evals], "o-", label="eval", linewidth=1.2)
        axes.set(xlabel="step", ylabel="cross entropy per byte (nats)", title=title)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(path, dpi=150)
        plt.close(figure)
