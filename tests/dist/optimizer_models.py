"""A model without a forward, its gradients, and optimizers, for tests that compare optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.dist.twin import local_part, randn, seeded, shard
from tests.harness import cached_mesh
from torch_gtp import WeightPlan
from torch_gtp._dtensor_layout import make_dtensor

TOPOLOGIES = {
    "gtp4": ((4,), ("gtp_remat",)),
    "dp2-gtp2": ((2, 2), ("dp", "gtp_remat")),
    "gtp2-dp2": ((2, 2), ("gtp_remat", "dp")),
    "dp4": ((4, 1), ("dp", "gtp_remat")),
    "pod2-dp2": ((2, 2, 1), ("pod", "dp", "gtp_remat")),
    "tp2-gtp2": ((2, 2), ("tp", "gtp_remat")),
    "gtp2-tp2": ((2, 2), ("gtp_remat", "tp")),
    "dp2-tp2": ((2, 2, 1), ("dp", "tp", "gtp_remat")),
}


class Net(nn.Module):
    """Even and uneven rows, fewer rows than ranks, a stack, a vector, a scalar, a tied weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.first = nn.Linear(6, 13)
        self.second = nn.Linear(13, 6)
        self.even = nn.Linear(9, 16, bias=False)
        self.flat = nn.Linear(9, 3, bias=False)
        self.across = nn.Linear(10, 5, bias=False)
        self.up = nn.Parameter(torch.randn(3, 7, 5))
        self.norm = nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return x


build = seeded(Net)


def make(topology: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    shape, names = TOPOLOGIES[topology]
    mesh, model = cached_mesh(shape, names), build().to(dtype)
    if "tp" in names:
        parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    return shard(model, mesh, plan={"across.weight": WeightPlan(shard_dim=1)})


def full_grads(step: int, without: Iterable[str] = ()) -> dict[str, Tensor]:
    """Gradients of the plain model, the same on every rank."""
    return {
        name: randn(1, *param.shape, seed=100 * step + index)[0]
        for index, (name, param) in enumerate(build().named_parameters())
        if name not in without
    }


def set_grads(model: nn.Module, grads: dict[str, Tensor]) -> None:
    for name, param in model.named_parameters():
        if name not in grads:
            param.grad = None
        elif isinstance(param, DTensor):
            param.grad = make_dtensor(local_part(param, grads[name]).clone(), param._spec)
        else:
            param.grad = grads[name].clone()


class Lion(torch.optim.Optimizer):
    """As third parties write optimizers: a loop, and arithmetic on the tensors that it is given."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(param)
                average = state["exp_avg"]
                param.data.mul_(1 - group["lr"] * group["weight_decay"])
                update = average.clone().mul_(beta1).add(param.grad, alpha=1 - beta1).sign_()
                param.add_(update, alpha=-group["lr"])
                average.mul_(beta2).add_(param.grad, alpha=1 - beta2)
        return loss


OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "adamw loop, amsgrad": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=False, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2),
    "sgd nesterov": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd nesterov foreach": lambda params: torch.optim.SGD(params, 1e-2, momentum=0.9, nesterov=True, foreach=True),
    "lion": Lion,
}
