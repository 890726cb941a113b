"""What a design with one fixed, process-wide order of weights assumes, I: identity and sharing.

Stable identity, a deterministic order, a single pass at a time, fixed membership, no sharing, build once and run for
ever: here every one of them is broken, and the numbers stay those of the plain model.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.dist.twin import (
    REORDERED,
    assert_grads,
    assert_local,
    check_twin,
    gather_mesh,
    on_ranks,
    plain_grads,
    randn,
    seeded,
    shard,
    training_run,
)
from tests.harness import current_double, state_leaks
from tests.models import CASES

run_mlp = training_run("mlp")


def like(stored, full):
    """A DTensor of a full value, laid out as another one."""
    from tests.dist.twin import local_part

    return DTensor.from_local(
        local_part(stored, full),
        stored.device_mesh,
        stored.placements,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )


# ---- stable object identity


@on_ranks(2)
def test_a_parameter_replaced_by_one_of_the_same_layout_is_taken(rank, world):
    """By assignment, by a load that rebinds, by swapping; between steps whose orders know the old object."""

    def assign(model, name, full):
        owner, _, attribute = name.rpartition(".")
        stored = model.get_parameter(name)
        setattr(model.get_submodule(owner), attribute, nn.Parameter(like(stored, full)))

    def rebind(model, name, full):
        model.load_state_dict({name: like(model.get_parameter(name), full)}, strict=False, assign=True)

    def swap(model, name, full):
        stored = model.get_parameter(name)
        torch.utils.swap_tensors(stored, nn.Parameter(like(stored, full)))

    def register(model, name, full):
        owner, _, attribute = name.rpartition(".")
        stored = model.get_parameter(name)
        model.get_submodule(owner).register_parameter(attribute, nn.Parameter(like(stored, full)))

    def delete_and_set(model, name, full):
        owner, _, attribute = name.rpartition(".")
        stored = model.get_parameter(name)
        delattr(model.get_submodule(owner), attribute)
        setattr(model.get_submodule(owner), attribute, nn.Parameter(like(stored, full)))

    for replace in (assign, rebind, swap, register, delete_and_set):
        plain, model = CASES["mlp"].build(), shard(CASES["mlp"].build())
        for step, name in enumerate(("2.weight", "0.bias", "4.weight", "2.weight")):
            full = randn(*plain.get_parameter(name).shape, seed=step)
            with torch.no_grad():
                plain.get_parameter(name).copy_(full)
            old = model.get_parameter(name)
            replace(model, name, full)
            assert (model.get_parameter(name) is old) == (replace is swap)
            for module in (plain, model):
                run_mlp(module, 0)
            what = f"gradients after {replace.__name__} of {name}"
            assert_grads(model, {n: p.grad for n, p in plain.named_parameters()}, what=what)
            model.zero_grad()
            plain.zero_grad()


@on_ranks(2)
def test_a_parameter_replaced_by_one_of_another_layout_is_an_error_that_says_what_to_do(rank, world):
    model = shard(CASES["mlp"].build())
    mesh = gather_mesh()
    wrong = {
        "whole": DTensor.from_local(torch.zeros(9, 10), mesh, [Replicate()], run_check=False),
        "columns": DTensor.from_local(torch.zeros(9, 5), mesh, [Shard(1)], run_check=False),
        "shape": DTensor.from_local(torch.zeros(5, 10), mesh, [Shard(0)], run_check=False),
    }
    original = model[2].weight
    for value in wrong.values():
        model[2].weight = nn.Parameter(value)
        with pytest.raises(ValueError, match=r"2\.weight: the parameter was replaced by a DTensor of another layout"):
            model(randn(4, 6))
        model[2].weight = original
        assert not (leaks := state_leaks(current_double())), leaks
    run_mlp(model, rank)
    assert_grads(model, plain_grads(CASES["mlp"].build, run_mlp, world))


@on_ranks(2)
def test_a_parameter_replaced_by_a_plain_tensor_is_used_as_it_is(rank, world):
    """Pruning, `functional_call` and adapters put full tensors in place; then nothing is gathered or reduced."""
    plain, model = CASES["mlp"].build(), shard(CASES["mlp"].build())
    value = randn(9, 10, seed=1)
    for _ in range(2):
        for module in (plain, model):
            module[2].weight = nn.Parameter(value.clone())
            run_mlp(module, 0)
        assert torch.equal(model[2].weight.grad, plain[2].weight.grad)
        assert torch.equal(model[2].weight, value)
        for module in (plain, model):
            module.zero_grad()


@on_ranks(2)
def test_an_optimizer_that_swaps_in_averaged_parameters_and_back_sees_the_right_weights(rank, world):
    """Values copied in place under `no_grad`, as moving averages are, are seen by the next forward."""
    plain, model = CASES["mlp"].build(), shard(CASES["mlp"].build(), reshard_after_forward=False)
    x = randn(4, 6)
    for factor in (2.0, 0.5, 3.0):
        with torch.no_grad():
            for module in (plain, model):
                for p in module.parameters():
                    p.mul_(factor)
        assert torch.equal(model(x), plain(x))


@on_ranks(2)
def test_modules_may_be_added_replaced_and_removed_between_steps(rank, world):
    plain, model = (nn.ModuleDict({"body": CASES["mlp"].build()}) for _ in range(2))
    shard(model["body"])

    def both(change, *args):
        for module in (plain, model):
            change(module["body"], *args)
            run_mlp(module["body"], 0)
        grads = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        for name, p in model.named_parameters():
            if isinstance(p.grad, DTensor):
                assert_local({name: p.grad}, {name: grads[name]})
            else:
                assert torch.equal(p.grad, grads[name])
        model.zero_grad()
        plain.zero_grad()

    def replace(body):
        torch.manual_seed(1)
        body[2] = nn.Linear(10, 9)

    def remove(body):
        del body[3]

    def add(body):
        torch.manual_seed(2)
        body.append(nn.Linear(3, 3))

    for change in (lambda body: None, replace, remove, add, lambda body: None):
        both(change)


@on_ranks(2)
def test_a_sharded_block_may_move_to_another_place_of_the_model(rank, world):
    def rotate(model):
        layers = list(model.layers)
        model.layers = nn.ModuleList(layers[1:] + layers[:1])

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    plain, model = seeded(Layers)(), shard(seeded(Layers)())
    for _ in range(4):
        for module in (plain, model):
            module(randn(4, 6)).sum().backward()
            rotate(module)
        assert_grads(model, {n: p.grad for n, p in plain.named_parameters()})
        model.zero_grad()
        plain.zero_grad()


# ---- no sharing


@on_ranks(2)
def test_a_tied_weight_may_be_used_at_any_two_places_of_the_order(rank, world):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
            self.layers[2].weight = self.layers[0].weight
            self.layers[3].bias = self.layers[1].bias

        def forward(self, x, path):
            for index in path:
                x = torch.tanh(self.layers[index](x))
            return x

    model = shard(seeded(Tied)())
    assert model.layers[2].weight is model.layers[0].weight
    for path in ("0123", "02", "20", "0123", "1320", "22", "0123"):

        def run(module, coordinate, path=path):
            module(randn(4, 6, seed=coordinate), [int(i) for i in path]).square().sum().backward()

        run(model, rank)
        assert_grads(model, plain_grads(seeded(Tied), run, world), REORDERED, f"gradients of {path}")
        model.zero_grad()


@on_ranks(2)
def test_one_module_may_stand_at_two_places(rank, world):
    def build():
        layer = nn.Linear(6, 6)
        return nn.Sequential(layer, nn.Tanh(), nn.Linear(6, 6), layer)

    def run(model, coordinate):
        model(randn(4, 6, seed=coordinate)).square().sum().backward()

    check_twin(rank, world, seeded(build), run, rtol=REORDERED)


@on_ranks(2)
def test_a_tie_may_be_broken_and_made_after_sharding(rank, world):
    plain, model = CASES["tied_lm"].build(), shard(CASES["tied_lm"].build())
    run = training_run("tied_lm")

    def same_grads():
        grads = {n: p.grad for n, p in plain.named_parameters()}
        assert_grads(model, grads, REORDERED)
        plain.zero_grad()
        model.zero_grad()

    for module in (plain, model):
        module.head.weight = nn.Parameter(module.head.weight.detach().clone() * 2)
        run(module, 0)
    assert model.head.weight is not model.embed.weight
    same_grads()
    for module in (plain, model):
        module.head.weight = module.embed.weight
        run(module, 0)
    same_grads()
