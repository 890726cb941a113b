"""Train a small Llama on real text, with tensor parallelism and GTP on the same weights.

    # TP=2 x gtp_remat=2: what `make train` runs.
    torchrun --standalone --nproc-per-node 4 examples/train_lm.py
    # dp=2 x gtp_remat=2, from the checkpoint of another topology.
    torchrun --standalone --nproc-per-node 4 examples/train_lm.py --tensor-parallel-size 1 \
        --num-weight-shards 2 --resume runs/checkpoints
    # One process, no collectives.
    python examples/train_lm.py

Each weight is stored as `1 / num_weight_shards` of itself: `tensor_parallel_size` of that by tensor
parallelism, the rest (`gtp_remat`) by GTP. The processes that are left form the data-parallel axis `dp`.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import torch_gtp
from checkpointing import Progress, load_checkpoint, save_checkpoint
from llama_model import Footprint, build_model, llama_config
from run_report import EvalRecord, RunReport, StepRecord, peak_memory
from text_data import VOCAB_SIZE, Reader, Windows, describe_text, load_text, train_and_eval_windows
from torch_gtp import GTPModule, GTPPolicy

# The axes along which ranks read different data, and over which a loss is averaged.
DATA_AXES = ("dp", "gtp_remat")
MAX_GRAD_NORM = 1.0
EVAL_SAMPLES = 32


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    topology = parser.add_argument_group("topology")
    topology.add_argument(
        "--tensor-parallel-size", type=int, help="default: 2 if there are 4, 6, 8, ... processes, else 1"
    )
    topology.add_argument(
        "--num-weight-shards", type=int, help="parts of each weight, TP included; default: one per process"
    )
    topology.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    model = parser.add_argument_group("model")
    model.add_argument("--hidden", type=int, default=64)
    model.add_argument("--layers", type=int, default=2)
    model.add_argument("--seq-length", type=int, default=128)
    model.add_argument(
        "--param-dtype", choices=("float32", "bfloat16"), default="float32", help="of the gathers and GEMMs"
    )
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=int, default=100, help="of the whole run, a resumed part included")
    training.add_argument("--micro-batch-size", type=int, default=8, help="sequences per reader and microbatch")
    training.add_argument("--gradient-accumulation", type=int, default=1, help="microbatches per step")
    training.add_argument(
        "--per-token-loss", action="store_true", help="sum gradients of summed losses, not means of means"
    )
    training.add_argument("--lr", type=float, default=3e-3)
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--eval-interval", type=int, default=50, help="steps; 0: at the end only")
    output = parser.add_argument_group("output")
    output.add_argument("--output-dir", type=Path, default=Path("runs/train_lm"), help="for metrics.json and loss.png")
    output.add_argument("--checkpoint-dir", type=Path, help="save a checkpoint here at the end of the run")
    output.add_argument("--checkpoint-interval", type=int, default=0, help="steps; 0: at the end only")
    output.add_argument("--resume", type=Path, help="a checkpoint, or a folder of them, written on any topology")
    return parser.parse_args()


def init_distributed(device_type: str) -> torch.device:
    """Join the process group (of one process, without a launcher) and return this rank's device."""
    backend = "gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if device_type == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def build_mesh(args: argparse.Namespace) -> DeviceMesh:
    world_size = dist.get_world_size()
    tp = args.tensor_parallel_size or (2 if world_size >= 4 and world_size % 2 == 0 else 1)
    shards = args.num_weight_shards or world_size
    return torch_gtp.build_mesh(args.device, tp=tp, num_weight_shards=shards)


def build_policy(args: argparse.Namespace) -> GTPPolicy:
    mixed_precision = MixedPrecisionPolicy()
    if args.param_dtype == "bfloat16":
        # Weights travel and multiply in bf16; gradients are summed in fp32, into fp32 shards.
        mixed_precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return GTPPolicy(mp=mixed_precision, reduction="sum" if args.per_token_loss else "mean")


def build_reader(args: argparse.Namespace, mesh: DeviceMesh) -> Reader:
    index, count = 0, 1
    for axis in DATA_AXES:
        index = index * mesh[axis].size() + mesh.get_local_rank(axis)
        count *= mesh[axis].size()
    return Reader(index, count, args.micro_batch_size, args.gradient_accumulation)


def sum_over_readers(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """One addend per reader: `tp` ranks hold the same value and are not summed over."""
    for axis in DATA_AXES:
        if mesh[axis].size() > 1:
            dist.all_reduce(value, group=mesh.get_group(axis))
    return value


@dataclass
class Trainer:
    """The parts of one run, and its two loops."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    mesh: DeviceMesh
    reader: Reader
    train_windows: Windows
    eval_windows: Windows
    device: torch.device
    seq_length: int
    per_token_loss: bool

    @property
    def tokens_per_step(self) -> int:
        return self.reader.global_batch * self.seq_length

    def step(self, progress: Progress) -> tuple[float, float]:
        """One optimizer step over one global batch: its loss, and the gradient norm before clipping."""
        assert isinstance(self.model, GTPModule)  # gtp_shard has mixed it in
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        for microbatch in range(self.reader.accumulation):
            # Weight gradients are always reduce-scattered into their shards; the average over `dp` can wait
            # for the last microbatch.
            self.model.set_requires_gradient_sync(microbatch == self.reader.accumulation - 1)
            samples = self.reader.samples(progress.samples, microbatch)
            loss = self.microbatch_loss(*self.train_windows.batch(samples, self.device))
            loss.backward()
            total += loss.detach()
        grad_norm = torch_gtp.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        progress.step += 1
        progress.samples += self.reader.global_batch
        total = sum_over_readers(total, self.mesh)
        if not self.per_token_loss:
            total /= self.reader.count
        return float(total), float(grad_norm)

    def microbatch_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """This microbatch's part of the loss, scaled so that the policy's reduction gives the global mean."""
        losses = self.token_losses(inputs, targets)
        if self.per_token_loss:
            # Gradients are summed over the readers (reduction="sum"), so divide by the tokens of the whole
            # step. Their number is known here; with padding it would be summed over the readers first.
            return losses.sum() / self.tokens_per_step
        # Gradients are averaged over the readers (reduction="mean"): only accumulation is left to divide by.
        return losses.mean() / self.reader.accumulation

    def token_losses(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input_ids=inputs, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss of the first held-out windows, the same ones on every topology."""
        wanted = min(EVAL_SAMPLES, len(self.eval_windows))
        total = torch.zeros(2, device=self.device)
        self.model.eval()
        # Every rank runs the same number of forwards, because each of them gathers weights together with
        # the others. A reader that has run out of samples runs on repeated ones and does not count them.
        for first in range(0, wanted, self.reader.micro_batch_size * self.reader.count):
            samples = self.reader.samples(first, microbatch=0)
            batch = self.eval_windows.batch([sample % wanted for sample in samples], self.device)
            losses = self.token_losses(*batch).view(len(samples), self.seq_length).mean(dim=1)
            counted = torch.tensor([float(sample < wanted) for sample in samples], device=self.device)
            total += torch.stack([(losses * counted).sum(), counted.sum()])
        self.model.train()
        loss_sum, count = sum_over_readers(total, self.mesh).tolist()
        return loss_sum / count


def build_trainer(args: argparse.Namespace, mesh: DeviceMesh, text: bytes, device: torch.device) -> Trainer:
    config = llama_config(vocab_size=VOCAB_SIZE, hidden=args.hidden, layers=args.layers, seq_length=args.seq_length)
    model = build_model(config, mesh, build_policy(args), args.seed)
    train_windows, eval_windows = train_and_eval_windows(text, args.seq_length, args.seed)
    return Trainer(
        model=model,
        # After gtp_shard, to own the shards. All are DTensors on one mesh, norms too: one group will do.
        optimizer=torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), fused=True),
        mesh=mesh,
        reader=build_reader(args, mesh),
        train_windows=train_windows,
        eval_windows=eval_windows,
        device=device,
        seq_length=args.seq_length,
        per_token_loss=args.per_token_loss,
    )


def describe(args: argparse.Namespace, trainer: Trainer) -> dict[str, Any]:
    """Everything that is needed to read the numbers of this run."""
    mesh, reader = trainer.mesh, trainer.reader
    footprint = Footprint.of(trainer.model)
    policy = build_policy(args)
    axes = " ".join(f"{axis}={mesh[axis].size()}" for axis in mesh.mesh_dim_names or ())
    batch = f"{reader.micro_batch_size} x {reader.count} readers x {reader.accumulation} microbatches"
    summary = (
        f"{footprint.sharded} of {footprint.parameters} weights sharded, "
        f"{footprint.bytes_unsharded / 2**10:,.1f} -> {footprint.bytes_per_rank / 2**10:,.1f} KiB per rank | "
        f"{axes} | "
        f"param_dtype={args.param_dtype} reduction={policy.reduction} prefetch={policy.prefetch} | "
        f"global batch {reader.global_batch} = {batch}"
    )
    return {
        "title": f"Llama, hidden {args.hidden}, {args.layers} layers, {axes}",
        "summary": summary,
        "arguments": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
        "axes": {axis: mesh[axis].size() for axis in mesh.mesh_dim_names or ()},
        "global_batch": reader.global_batch,
        "bytes_unsharded": footprint.bytes_unsharded,
        "bytes_per_rank": footprint.bytes_per_rank,
        "torch": torch.__version__,
    }


def train(args: argparse.Namespace, trainer: Trainer, progress: Progress, report: RunReport) -> None:
    """Steps, evaluations and checkpoints until `--steps`."""
    while progress.step < args.steps:
        start = time.perf_counter()
        loss, grad_norm = trainer.step(progress)
        speed = trainer.tokens_per_step / (time.perf_counter() - start)
        report.add_step(StepRecord(progress.step, loss, grad_norm, speed, peak_memory(trainer.device)))
        done = progress.step == args.steps
        if done or (args.eval_interval and progress.step % args.eval_interval == 0):
            report.add_eval(EvalRecord(progress.step, trainer.evaluate()))
        due = done or (args.checkpoint_interval and progress.step % args.checkpoint_interval == 0)
        if args.checkpoint_dir and due:
            save_checkpoint(args.checkpoint_dir, trainer.model, trainer.optimizer, progress)


def main() -> None:
    args = parse_args()
    device = init_distributed(args.device)
    text = load_text()
    trainer = build_trainer(args, build_mesh(args), text, device)
    progress = Progress()
    if args.resume:
        load_checkpoint(args.resume, trainer.model, trainer.optimizer, progress)
        # The checkpoint brings its own learning rate; the command line is what was asked for now.
        for group in trainer.optimizer.param_groups:
            group["lr"] = args.lr
    configuration = {**describe(args, trainer), "text": describe_text(text)}
    is_first_rank = dist.get_rank() == 0
    if is_first_rank:
        print(f"text: {configuration['text']}", flush=True)
        print(f"gtp: {configuration['summary']}", flush=True)
        if args.resume:
            print(f"resumed at step {progress.step}, sample {progress.samples}", flush=True)
    with RunReport(first_step=progress.step, last_step=args.steps, visible=is_first_rank) as report:
        train(args, trainer, progress, report)
    report.write(args.output_dir, configuration)
    if is_first_rank and report.steps:
        first, last = report.steps[0], report.steps[-1]
        losses = f"loss {first.loss:.3f} -> {last.loss:.3f}, eval {report.evals[-1].loss:.3f}"
        print(f"{losses}; see {args.output_dir}/")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
