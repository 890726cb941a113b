"""Programs that need the ordering edges of the library, each compared with the plain model. See `test_mutations`.

`even` weights are sent as they are stored; `padded` ones are copied into the memory of the collective.
"""

from __future__ import annotations

from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import torch_gtp._replicate
from tests.dist.lockstep import Lockstep, adamw
from tests.dist.twin import REORDERED, gather_mesh, hybrid_mesh, plain_grads, randn, seeded, shard
from tests.harness import cached_mesh
from tests.models import MLP, Conditional
from tests.reference import assert_matches, gather_full_dict


def mlp_loss(model, coordinate, micro):
    return model(randn(4, model[0].in_features, seed=10 * micro + coordinate)).square().mean()


even = seeded(lambda: MLP(6, 10, 6, 4))
padded = seeded(lambda: MLP(6, 9, 7, 3))
same_shapes = seeded(lambda: MLP(8, 8, 8, 8))


def train(build, rank, world, steps=3, micros=(0,), sync_last_only=False, **options):
    both = Lockstep(build, mlp_loss, world, **options)
    for _ in range(steps):
        both.step(rank, micros, sync_last_only=sync_last_only)
    return both


def training(rank, world):
    train(even, rank, world)


def training_padded(rank, world):
    train(padded, rank, world)


def training_same_shapes(rank, world):
    train(same_shapes, rank, world)


def training_hybrid(rank, world):
    train(even, rank, world, mesh=hybrid_mesh())


def training_in_units_that_stay_open(rank, world):
    """The next unit's shards are there when this unit's last weight has its turn, so nothing else stops a deferral."""
    build = seeded(lambda: nn.Sequential(*(MLP(6, 6, 6, bias=False) for _ in range(3))))

    def run(model, coordinate):
        model(randn(4, 6, seed=coordinate)).square().mean().backward()

    mesh = hybrid_mesh()
    model = shard(build(), mesh["gtp_remat"])
    for block in model:
        fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False).set_reshard_after_backward(False)
    for _ in range(2):  # the second time in a recorded order
        run(model, rank)
    for block in model:
        FSDPModule.reshard(block)  # FSDP2 keeps gradients with the sharded parameters
    grads = gather_full_dict({name: p.grad for name, p in model.named_parameters()})
    expected = plain_grads(build, run, world)
    assert_matches(grads, {name: 2 * grad for name, grad in expected.items()}, REORDERED, "gradients")


def training_synchronous(rank, world):
    train(even, rank, world, async_reduction=False)


def accumulating(rank, world):
    train(even, rank, world, micros=(0, 1), sync_last_only=True, mesh=cached_mesh((world, 1), ("dp", "gtp_remat")))


def accumulating_with_a_branch(rank, world):
    """The last microbatch takes the other branch, and reaches none of the buckets that the first one left a part in."""
    with mock.patch.object(torch_gtp._replicate, "BUCKET_BYTES", 100):
        mesh = cached_mesh((world, 1), ("dp", "gtp_remat"))
        both = Lockstep(seeded(Conditional), branch_loss, world, mesh=mesh)
        for _ in range(2):
            both.step(rank, (0, 1), sync_last_only=True)


def branch_loss(model, coordinate, micro):
    return model(randn(4, 10, seed=10 * micro + coordinate), micro % 2 == 0).square().mean()


def branching(rank, world):
    """Left, right, then an update of both: the second forward foresaw the left branch and did not use it."""
    both = Lockstep(seeded(Conditional), branch_loss, world)
    for _ in range(3):
        both.step(rank, (0, 1))


def partial_backward(rank, world):
    """A backward that ends before the weight that it foresaw, and then an update of that weight."""
    both = Lockstep(even, mlp_loss, world)
    seen = []
    both.model[3].register_forward_hook(lambda module, args, out: seen.append(out))

    def look():
        out = both.model(randn(4, 6))
        torch.autograd.grad(out.sum(), [seen[-1]])
        seen.clear()

    for _ in range(3):
        both.step(rank, before_update=look)


def casting(rank, world):
    model = shard(even(), mp=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    plain = even().bfloat16()
    for _ in range(2):
        assert torch.equal(model(randn(4, 6)), plain(randn(4, 6).bfloat16())), "outputs: relative error above 0"


def kept(rank, world):
    both = train(even, rank, world, steps=1)
    for _ in range(2):
        both.model.unshard()
        both.check_output(rank)
        both.step(rank)
        both.check_output(rank)


def kept_and_written(rank, world):
    both = train(even, rank, world, steps=1)
    both.model.unshard()
    with torch.no_grad():
        for parameter in (*both.model.parameters(), *both.plain.parameters()):
            parameter.add_(0.1)
    both.check_output(rank)


def kept_and_loaded(rank, world):
    both = train(even, rank, world, steps=1)
    state = {name: value.clone() for name, value in both.model.state_dict().items()}
    full = gather_full_dict(state)
    both.step(rank)
    both.model.unshard()
    both.model.load_state_dict(state)
    both.plain.load_state_dict(full)
    both.check_output(rank)


def forward_without_backward(rank, world):
    """A forward leaves its weights to a backward that never comes; then they change, without an optimizer."""
    both = Lockstep(even, mlp_loss, world, reshard_after_forward=False)
    both.step(rank)
    for each in (both.model, both.plain):
        mlp_loss(each, rank, 0)
        with torch.no_grad():
            torch._foreach_add_(list(each.parameters()), 0.1)
    both.check_output(rank)


def stashed(rank, world):
    """A module that keeps the weight that it saw, and uses it in a later call."""

    class Stash(nn.Linear):
        def forward(self, x):
            before, self.__dict__["kept"] = self.__dict__.get("kept"), self.weight
            out = super().forward(x)
            return out if before is None else out + nn.functional.linear(x, before)

    def loss(model, coordinate, micro):
        model[0].__dict__.pop("kept", None)
        x = randn(4, 8, seed=coordinate)
        for _ in range(2):
            x = model(x)
        return x.square().mean()

    both = Lockstep(seeded(lambda: nn.Sequential(Stash(8, 8), nn.Linear(8, 8))), loss, world)
    for _ in range(3):
        both.step(rank)


def recomputing(rank, world):
    """Checkpointing: a weight is gathered for the recomputation and for the backward of it, at the same time."""

    class Blocks(nn.Sequential):
        def forward(self, x):
            for block in self:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    def loss(model, coordinate, micro):
        return model(randn(4, 8, seed=coordinate)).square().mean()

    both = Lockstep(seeded(lambda: Blocks(MLP(8, 8, 8), MLP(8, 8, 8))), loss, world)
    for _ in range(3):
        both.step(rank)


def changed_between(rank, world):
    """A weight that changes between forward and backward must not go unnoticed."""
    model = shard(even(), gather_mesh())
    optimizer = adamw(model.parameters())
    mlp_loss(model, rank, 0).backward()
    loss = mlp_loss(model, rank, 1)
    optimizer.step()
    try:
        loss.backward()
        outcome = "a backward with the wrong weights went through"
    except RuntimeError as error:
        outcome = str(error)
    assert "was modified" in outcome, outcome
    model.reset_iter_state()
