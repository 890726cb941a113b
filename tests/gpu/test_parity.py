"""On a GPU, over NCCL, a sharded model trains as the plain one does on one rank.

Tolerances, relative to the largest element of a tensor. TF32 is off. In fp32 a rank's GEMMs have the shapes of the
oracle's, but may run another kernel where memory is aligned differently: sums of at most 42 terms, in another order, of
6e-8 each, and three steps of feedback. In bf16 (2**-9) a ring rounds once per rank, where the oracle rounds once
per level of a tree; after the first step these differences feed back.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import parallelize_module

from tests.gpu.ranks import cases, device, mesh, together
from tests.models import CASES
from tests.reference import assert_matches, gather_full_dict, reference_step, relative_error
from torch_gtp import GTPPolicy, gtp_shard

FP32 = 5e-6
BF16_ULP = 2**-8
STEPS = 3

MODELS = ["mlp", "mlp_even", "attention_lm", "tied_lm", "mha", "shared_block", "conditional", "lora"]
TP_MODELS = ["mlp", "attention_lm"]


def adamw(params: Any) -> torch.optim.Optimizer:
    # With the usual eps, gradients that are zero but for rounding become full steps.
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-3, foreach=True)


class Job:
    """One model on one mesh, and the same on one rank."""

    def __init__(self, model: str, mesh_name: str, dtype: torch.dtype = torch.float32):
        self.case, self.mesh, self.dtype = CASES[model], mesh(mesh_name), dtype
        axes = list(zip(self.mesh.mesh_dim_names or (), self.mesh.shape, self.mesh.get_coordinate() or (), strict=True))
        self.coordinate, self.coordinates = 0, 1
        for name, size, mine in axes:
            if name != "tp":
                self.coordinate, self.coordinates = self.coordinate * size + mine, self.coordinates * size

    def build(self) -> nn.Module:
        return self.case.build().to(device(), self.dtype)

    def batch(self, step: int, coordinate: int) -> tuple[Any, ...]:
        # Even or odd is the same on all coordinates: models that branch on data take it from there.
        batch = self.case.batch(100 * step + 2 * coordinate + step % 2)
        return tuple(self.moved(value) if isinstance(value, Tensor) else value for value in batch)

    def moved(self, value: Tensor) -> Tensor:
        return value.to(device(), self.dtype if value.is_floating_point() else value.dtype)

    def sharded(self, **policy: Any) -> nn.Module:
        model = self.build()
        if "tp" in (self.mesh.mesh_dim_names or ()):
            parallelize_module(model, self.mesh["tp"], self.case.plan())
        return gtp_shard(model, self.mesh, policy=GTPPolicy(min_shard_numel=1, **policy))

    def check(self, first: float, later: float, *, steps: int = STEPS, **policy: Any) -> None:
        """Train both. `first` and `later`: tolerances in the first step and after it."""
        model = self.sharded(**policy)
        optimizer = adamw(model.parameters())
        losses, grads = [], []
        for step in range(steps):
            loss = self.case.loss(model, self.batch(step, self.coordinate))
            loss.backward()
            losses.append(loss.item())
            grads.append(gather_full_dict({n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
            optimizer.step()
            optimizer.zero_grad()
        params = gather_full_dict(dict(model.named_parameters()))

        batches = [[[self.batch(step, other) for other in range(self.coordinates)]] for step in range(steps)]
        expected = reference_step(self.build, batches, adamw, self.case.loss)
        on_host = [{name: value.cpu() for name, value in each.items()} for each in (*expected.grads, expected.params)]
        theirs = [step[0][self.coordinate] for step in expected.losses]
        error = relative_error(*(torch.tensor(each, dtype=torch.float64) for each in (losses, theirs)))
        assert error <= later, f"losses: relative error {error:.2e} of {losses} to {theirs}"
        for step, (ours, wanted) in enumerate(zip(grads, on_host, strict=False)):
            assert_matches(ours, wanted, later if step else first, f"gradients of step {step}")
        assert_matches(params, on_host[-1], later, f"parameters after {steps} steps")


@cases(where=[f"{model}-{on}" for model, on in itertools.product(MODELS, ("gtp", "dp-gtp"))])
@together
def test_fp32_training_equals_the_plain_model(where):
    model, _, on = where.partition("-")
    Job(model, on).check(FP32, FP32)


@cases(model=TP_MODELS)
@together
def test_fp32_training_on_top_of_tensor_parallelism_equals_the_plain_model(model):
    Job(model, "tp-gtp").check(FP32, FP32)


@cases(where=[f"{model}-{on}" for model, on in itertools.product(("mlp", "attention_lm"), ("gtp", "dp-gtp"))])
@together
def test_bf16_training_equals_the_plain_model(where):
    model, _, on = where.partition("-")
    Job(model, on, torch.bfloat16).check((dist.get_world_size() + 1) * BF16_ULP, 0.1)


@cases(options=["no-prefetch", "whole-model-ahead", "synchronous", "kept", "checked"])
@together
def test_every_option_equals_the_plain_model(options):
    policy = {
        "no-prefetch": {"prefetch": False},
        "whole-model-ahead": {"lookahead_bytes": 1 << 30},
        "synchronous": {"async_reduction": False},
        "kept": {"reshard_after_forward": False},
        "checked": {"check": True},
    }[options]
    Job("attention_lm", "gtp").check(FP32, FP32, **policy)


@cases(model=["mlp", "attention_lm"])
@together
def test_gradients_of_mixed_precision_are_the_fp32_means_of_bf16_gradients(model):
    """fp32 parameters, gathered as bf16, reduced as fp32: one step has nothing to round but the GEMMs' own outputs."""
    job, low = Job(model, "gtp"), Job(model, "gtp", torch.bfloat16)
    sharded = job.sharded(mp=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    job.case.loss(sharded, job.batch(0, job.coordinate)).backward()
    found = gather_full_dict({name: p.grad for name, p in sharded.named_parameters() if p.grad is not None})
    parts = []
    for other in range(job.coordinates):
        plain = low.build()
        low.case.loss(plain, low.batch(0, other)).backward()
        parts.append({name: p.grad.float().cpu() for name, p in plain.named_parameters() if p.grad is not None})
    mean = {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}
    assert {value.dtype for value in found.values()} == {torch.float32}
    # A kernel chosen for another alignment may round an output the other way.
    assert_matches(found, mean, 2 * BF16_ULP, "gradients")
