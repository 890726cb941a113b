"""Shared by the GPU benchmarks: the ranks, a Llama-like model, the systems compared.

Every rank is one process with `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` in its environment, as `torchrun`
or `tools/ranks_on_one_gpu.sh` start it. Ranks use `cuda:LOCAL_RANK`.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import faulthandler
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import common
from torch_gtp import _collectives

# The model


@dataclass(frozen=True)
class Shape:
    """A Llama-like model and its batch on one rank."""

    width: int
    hidden: int
    layers: int
    heads: int
    vocab: int
    tokens: int
    batch: int = 1


CASES = {
    "large": Shape(width=4096, hidden=11008, layers=4, heads=32, vocab=32000, tokens=4096),
    "small": Shape(width=512, hidden=1376, layers=24, heads=8, vocab=32000, tokens=1024),
    "tiny": Shape(width=64, hidden=176, layers=3, heads=4, vocab=256, tokens=32),  # to try a script without a GPU
}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(shape.width), Attention(shape.width, shape.heads)
        self.norm2 = nn.RMSNorm(shape.width)
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Split projections, no positions: `forward` returns the loss."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build(shape: Shape, device: torch.device) -> Llama:
    """The model of one seed, in bf16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    try:
        with device:
            return Llama(shape)
    finally:
        torch.set_default_dtype(before)


def batch_of(shape: Shape, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Token ids and targets, others on each rank."""
    generator = torch.Generator().manual_seed(ranks.rank)
    size = (shape.batch, shape.tokens)
    ids, targets = (torch.randint(shape.vocab, size, generator=generator) for _ in range(2))
    return ids.to(ranks.device), targets.to(ranks.device)


# The ranks


@dataclass
class Ranks:
    """This process among its peers."""

    rank: int
    world: int
    device: torch.device
    limit: float
    started: float

    @classmethod
    def start(cls, device_type: str, *, limit: float) -> Ranks:
        """Join the process group. `limit`: seconds without progress after which every rank prints its stack and ends."""
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        faulthandler.enable()
        faulthandler.dump_traceback_later(limit, exit=True)
        timeout = datetime.timedelta(seconds=limit + 60)
        if device_type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", rank=rank, world_size=world, timeout=timeout, device_id=device)
        else:
            device = torch.device("cpu")
            torch.set_num_threads(1)
            dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timeout)
        ranks = cls(rank, world, device, limit, time.perf_counter())
        ranks.meet()
        return ranks

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def meet(self) -> None:
        """Every rank is here, and its GPU is idle."""
        self.synchronize()
        dist.all_reduce(torch.zeros(1, device=self.device))
        self.synchronize()

    def everyones(self, values: list[float]) -> list[list[float]]:
        """The numbers of every rank, in rank order."""
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        theirs = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(theirs, mine)
        return [each.tolist() for each in theirs]

    def say(self, text: str) -> None:
        """Print on rank 0, at once, and start the time limit anew."""
        faulthandler.dump_traceback_later(self.limit, exit=True)
        if self.rank == 0:
            print(f"[{time.perf_counter() - self.started:6.1f} s] {text}", flush=True)

    def finish(self) -> None:
        self.meet()
        faulthandler.cancel_dump_traceback_later()
        dist.destroy_process_group()


def conditions(ranks: Ranks) -> dict[str, Any]:
    """What the figures depend on besides the code."""
    prefixes = ("NCCL_", "TORCH_NCCL_", "CUDA_", "PYTORCH_", "TORCH_CUDA", "LD_PRELOAD")
    found: dict[str, Any] = {
        **common.versions(),
        "world": ranks.world,
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)},
    }
    if ranks.is_cuda:
        found.update(
            gpu=torch.cuda.get_device_name(),
            multiprocessors=torch.cuda.get_device_properties(ranks.device).multi_processor_count,
            cuda=torch.version.cuda,
            nccl=".".join(map(str, torch.cuda.nccl.version())),
        )
    return found


# The systems


@dataclass
class System:
    """One way to train the model: what to call, whose parameters to step, what ends a backward."""

    name: str
    module: nn.Module
    end_of_backward: Callable[[], None] = lambda: None

    def parameters(self) -> list[nn.Parameter]:
        return list(self.module.parameters())

    def forward_backward(self, ids: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.module(ids, targets)
        loss.backward()
        self.end_of_backward()
        return loss.detach()

    def zero_grad(self) -> None:
        self.module.zero_grad(set_to_none=True)


def plain(model: Llama, mesh: DeviceMesh) -> System:
    """No communication at all."""
    return System("plain", model)


def plain_with_wire(model: Llama, mesh: DeviceMesh) -> System:
    """The plain model, and beside it the collectives of `gtp`, which nothing waits for before the end of the backward.

    Same group, sizes and dtype, issued where the weight is used and where its gradient is there: what the same bytes
    cost by taking multiprocessors and bandwidth from the GEMMs. The all-reduce of the norms is left out.
    """
    group, world = mesh.get_group(), mesh.size()
    weights = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding)]
    largest = max(-(-module.weight.shape[0] // world) * module.weight[0].numel() for module in weights)
    shards = [torch.zeros(largest, dtype=torch.bfloat16, device=model.head.weight.device) for _ in range(2)]
    scratch = torch.zeros(largest * world, dtype=torch.bfloat16, device=model.head.weight.device)
    in_flight: list[_collectives.Handle] = []

    def gather(numel: int) -> None:
        in_flight.append(_collectives.all_gather(scratch[: numel * world], shards[0][:numel], group))

    def reduce(param: nn.Parameter, numel: int) -> None:
        assert param.grad is not None
        source = param.grad.flatten()
        if source.numel() != numel * world:  # rows that do not divide
            source = F.pad(source, (0, numel * world - source.numel()))
        in_flight.append(_collectives.reduce_scatter(shards[1][:numel], source, group, "avg"))

    def watch(module: nn.Linear | nn.Embedding) -> None:
        numel = -(-module.weight.shape[0] // world) * module.weight[0].numel()
        module.register_forward_pre_hook(lambda *_: gather(numel))
        module.weight.register_post_accumulate_grad_hook(lambda param: reduce(param, numel))
        # As in gtp: an embedding's weight is not read in backward, the last one is still there.
        if isinstance(module, nn.Linear) and module is not model.head:
            module.register_forward_hook(lambda _, args, out: out.register_hook(lambda grad: gather(numel)) and None)

    def wait() -> None:
        for handle in in_flight:
            handle.wait()
        in_flight.clear()

    for module in weights:
        watch(module)
    return System("plain+wire", model, wait)


def ddp(model: Llama, mesh: DeviceMesh) -> System:
    device = model.head.weight.device
    ids = [device.index] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(
        model, device_ids=ids, process_group=mesh.get_group(), gradient_as_bucket_view=True
    )
    return System("ddp", wrapped)


def fsdp2_block(model: Llama, mesh: DeviceMesh) -> System:
    """FSDP2 with one unit per block and one for the rest: the usual way."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return System("fsdp2_block", model)


def fsdp2_block_prefetch(model: Llama, mesh: DeviceMesh) -> System:
    """The same, told which block comes next, in both directions."""
    system = fsdp2_block(model, mesh)
    layers: list[Any] = list(model.layers)
    model.set_modules_to_forward_prefetch(layers[:1])  # type: ignore[operator]
    model.set_modules_to_backward_prefetch(layers[-1:])  # type: ignore[operator]
    for before, after in itertools.pairwise(layers):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    return replace(system, name="fsdp2_block_prefetch")


def fsdp2_linear(model: Llama, mesh: DeviceMesh) -> System:
    """FSDP2 with one unit per weight: it gathers what `gtp` gathers."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return System("fsdp2_linear", model)


def gtp(model: Llama, mesh: DeviceMesh, **policy: Any) -> System:
    """`gtp_shard` with its default policy, or with the options given."""
    return System("gtp", common.gtp(model, mesh, **policy))


SYSTEMS: dict[str, Callable[..., System]] = {
    "plain": plain,
    "plain+wire": plain_with_wire,
    "ddp": ddp,
    "fsdp2_block": fsdp2_block,
    "fsdp2_block_prefetch": fsdp2_block_prefetch,
    "fsdp2_linear": fsdp2_linear,
    "gtp": gtp,
}
SHARDED = ("fsdp2_block", "fsdp2_block_prefetch", "fsdp2_linear", "gtp")


def mode(text: str) -> str:
    """A command-line argument: a system, or `gtp:` and options of its policy (`gtp:wgrad_first=True,lookahead_bytes=0`)."""
    name, policy = _parse(text)
    if name not in SYSTEMS or (policy and name != "gtp"):
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(SYSTEMS)}, nor gtp:OPTION=VALUE,...")
    return text


def _parse(text: str) -> tuple[str, dict[str, Any]]:
    name, _, options = text.partition(":")
    pairs = (option.split("=") for option in options.split(",") if option)
    return name, {key: ast.literal_eval(value) for key, value in pairs}


def make(text: str, shape: Shape, ranks: Ranks, mesh: DeviceMesh) -> System:
    """The system that a `mode` names."""
    name, policy = _parse(text)
    system = SYSTEMS[name](build(shape, ranks.device), mesh, **policy)
    if name in SHARDED:
        common.assert_sharded(system.module, ranks.world)
    return system


def world_mesh(ranks: Ranks) -> DeviceMesh:
    """One axis over all ranks: every system uses the same process group, and so the same communicator."""
    return DeviceMesh(ranks.device.type, torch.arange(ranks.world), mesh_dim_names=("gtp_remat",))


@contextmanager
def on_side_stream(ranks: Ranks) -> Iterator[None]:
    """What warm-ups before a capture run in: no work of theirs may stay on the stream that is captured."""
    if not ranks.is_cuda:
        yield
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
