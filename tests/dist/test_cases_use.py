"""Situations that other libraries got wrong, III: frozen weights and adapters, ranks that differ, evaluation.

Each test stands for a public bug report about another library; none of them may happen here.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.dist.twin import (
    REORDERED,
    assert_grads,
    assert_local,
    check_twin,
    gather_meter,
    on_ranks,
    plain_grads,
    randn,
    seeded,
    shard,
    training_run,
)
from tests.harness import count, current_double, state_leaks
from tests.models import CASES, MLP, LoraLinear, with_lora
from tests.reference import gather_full_dict

# ---- frozen weights, adapters


@on_ranks(2)
def test_every_adapter_of_a_frozen_checkpointed_model_has_its_gradient(rank, world):
    """Only the first layer's adapters once learned."""

    class Checkpointed(nn.Module):
        def __init__(self, use_reentrant):
            super().__init__()
            self.use_reentrant = use_reentrant
            self.blocks = nn.ModuleList(with_lora(MLP(6, 10, 6)) for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
            return x

    def run(model, coordinate):
        model(randn(4, 6, seed=coordinate).requires_grad_()).square().mean().backward()

    for use_reentrant in (False, True):
        model = check_twin(rank, world, seeded(partial(Checkpointed, use_reentrant)), run)
        with current_double().section() as calls:
            run(model, rank)
        trained = [p for p in model.parameters() if p.requires_grad]
        assert len(trained) == 12
        assert all(p.grad._local_tensor.any() for p in trained if p._local_tensor.numel())
        assert count(calls)["reduce_scatter"] == 12


@on_ranks(2)
def test_the_shards_of_adapters_survive_a_round_trip_through_the_state_dict(rank, world):
    """The slice of rank 0 was once saved for everybody."""
    model = shard(with_lora(MLP(10, 14, 9)))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name in trained:
            model.get_parameter(name)._local_tensor.fill_(rank + 1)
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items() if name in trained}
    with torch.no_grad():
        for name in trained:
            model.get_parameter(name).zero_()
    assert not model.load_state_dict(saved, strict=False).unexpected_keys
    for name in trained:
        local = model.get_parameter(name)._local_tensor
        assert torch.equal(local, torch.full_like(local, rank + 1.0)), name


@on_ranks(2)
def test_an_adapter_is_merged_shard_by_shard(rank, world):
    build = seeded(lambda: nn.Sequential(LoraLinear(nn.Linear(6, 9))))
    plain, model = build(), shard(build())
    with torch.no_grad():
        for module in (plain, model):
            lora = module[0]
            lora.base.weight += lora.b.weight @ lora.a.weight
            lora.b.weight.zero_()
    merged = gather_full_dict({"w": model[0].base.weight})["w"]
    # One product of 9x3 and 3x6, whose rows one rank or two compute.
    assert_local({"w": model[0].base.weight}, {"w": plain[0].base.weight.detach()}, REORDERED)
    x = randn(4, 6)
    assert torch.allclose(model(x), F.linear(x, merged, plain[0].base.bias), atol=1e-6)


@on_ranks(2)
def test_adapters_put_in_after_sharding_are_plain_until_they_are_sharded(rank, world):
    """Mixed plain tensors and DTensors once failed in the forward."""

    def freeze_and_adapt(model):
        torch.manual_seed(4)
        model.requires_grad_(False)
        for index in (0, 2):
            model[index] = LoraLinear(model[index])
        return model

    def run(model, coordinate):
        model(randn(4, 6, seed=coordinate)).square().mean().backward()

    build = lambda: freeze_and_adapt(CASES["mlp"].build())  # noqa: E731
    expected = plain_grads(build, run, world)
    alone = build()
    run(alone, rank)
    model = freeze_and_adapt(shard(CASES["mlp"].build()))
    run(model, rank)
    for name, p in alone.named_parameters():
        found = model.get_parameter(name).grad
        assert found is None if p.grad is None else torch.equal(found, p.grad)  # nobody reduces a plain parameter
    model.zero_grad()
    for index in (0, 2):
        shard(model[index].a)
        shard(model[index].b)
    for _ in range(2):
        run(model, rank)
        assert_grads(model, expected)
        model.zero_grad()


@on_ranks(2)
def test_a_tensor_subclass_that_cannot_be_gathered_is_refused_by_name(rank, world):
    """Quantized parameters once lost what they carry beside their bytes."""
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Sequential(nn.Linear(6, 6))
    model[0].weight = nn.Parameter(TwoTensor(torch.randn(6, 6), torch.randn(6, 6)))
    with pytest.raises((TypeError, ValueError), match=r"0\.weight.*TwoTensor"):
        shard(model)


@on_ranks(2)
def test_attributes_of_a_parameter_stay_on_it(rank, world):
    class Scaled(nn.Parameter):
        pass

    model = nn.Sequential(nn.Linear(6, 6))
    model[0].weight = Scaled(torch.randn(6, 6))
    model[0].weight.scale = 3.0
    shard(model)
    assert model[0].weight.scale == 3.0


@on_ranks(2)
def test_writing_into_a_weight_inside_of_forward_is_an_error(rank, world):
    """It would change the gathered copy and not the shard, and the backward would see other values."""

    class Clips(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    model = shard(nn.Sequential(nn.Linear(6, 6), Clips(6, 6)))
    for context in (torch.enable_grad, torch.no_grad):
        with context(), pytest.raises(ValueError, match=r"1\.weight: .*in place"):
            model(randn(4, 6))
        assert not (leaks := state_leaks(current_double())), leaks
    for param in model.parameters():
        param.data.clamp_(-0.1, 0.1)
    assert max(p._local_tensor.abs().max().item() for p in model.parameters()) <= 0.1 + 1e-6


# ---- ranks that differ


@on_ranks(2)
def test_a_dummy_pass_keeps_ranks_together_that_have_no_data_for_a_branch(rank, world):
    """An encoder that runs only where there is an image once left the other ranks waiting."""

    class Multimodal(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.body = MLP(6, 10, 6), MLP(6, 8, 5)

        def forward(self, x, image):
            seen = self.encoder(image if image is not None else torch.zeros(4, 6))
            return self.body(x + (seen if image is not None else 0 * seen))

    def run(model, coordinate):
        image = randn(4, 6, seed=9) if coordinate == 0 else None
        model(randn(4, 6, seed=coordinate), image).square().mean().backward()

    check_twin(rank, world, seeded(Multimodal), run)


# ---- evaluation, several models


@on_ranks(2)
def test_ranks_may_generate_different_lengths_from_gathered_weights(rank, world):
    """`generate` once hung as soon as one rank was done before the others."""
    plain, model = CASES["attention_lm"].build(), shard(CASES["attention_lm"].build())
    training_run("attention_lm")(model, rank)
    model.zero_grad()

    @torch.no_grad()
    def generate(module, length):
        ids = torch.arange(3).unsqueeze(0)
        for _ in range(length):
            ids = torch.cat([ids, module(ids)[:, -1:].argmax(-1)], dim=1)
        return ids

    with model.gathered():
        with current_double().section() as calls:
            found = generate(model, 2 + 3 * rank)
        assert not calls
    assert torch.equal(found, generate(plain, 2 + 3 * rank))
    training_run("attention_lm")(model, rank)
    assert_grads(model, plain_grads(CASES["attention_lm"].build, training_run("attention_lm"), world))


@on_ranks(2)
def test_several_models_without_gradients_keep_nothing_gathered(rank, world):
    """Weights of a root were once never resharded after a forward."""
    models = [shard(CASES[name].build()) for name in ("mlp", "attention_lm", "tied_lm")]
    inputs = [CASES[name].batch(0) for name in ("mlp", "attention_lm", "tied_lm")]
    with gather_meter() as meter:
        for context in (torch.no_grad, torch.inference_mode, torch.no_grad):
            for model, args in zip(models, inputs, strict=True):
                with context():
                    model(*args)
                assert meter.live_count == 0
        models[1].unshard()
        kept = meter.live_count
        assert kept == sum(p.ndim == 2 for p in models[1].parameters())
        with torch.no_grad():
            models[1](*inputs[1])
        assert meter.live_count == kept
        models[1].reshard()
        assert meter.live_count == 0


@on_ranks(2)
def test_an_export_right_after_a_step_has_the_new_values(rank, world):
    """Weights were once exported before the pending gather had finished."""
    run = training_run("mlp")
    model, plain = shard(CASES["mlp"].build()), CASES["mlp"].build()
    optimizer, plain_optimizer = (torch.optim.AdamW(m.parameters(), lr=0.1, foreach=True) for m in (model, plain))
    for _ in range(2):
        model.unshard()
        run(model, 0)
        run(plain, 0)
        optimizer.step()
        plain_optimizer.step()
        with model.gathered():
            exported = {name: p.clone() for name, p in model.named_parameters()}
        assert all(torch.allclose(exported[n], p, atol=1e-6) for n, p in plain.named_parameters())
        found = gather_full_dict(dict(model.named_parameters()))
        assert all(torch.equal(exported[name], value) for name, value in found.items())


@on_ranks(2)
def test_a_trained_and_a_frozen_model_used_in_turns_have_orders_of_their_own(rank, world):
    """An actor and its reference once shared one cache of the order, which each call of the other made invalid."""

    def run(pair, coordinate):
        actor, reference = pair["actor"], pair["reference"]
        x = randn(4, 6, seed=coordinate)
        for _ in range(2):
            with torch.no_grad():
                target = reference(x)
            (actor(x) - target).square().mean().backward()

    def build():
        pair = nn.ModuleDict({"actor": CASES["mlp"].build(), "reference": CASES["mlp"].build(seed=1)})
        pair["reference"].requires_grad_(False)
        return pair

    expected = plain_grads(build, run, world)
    pair = build()
    for model in pair.values():
        shard(model)
    for step in range(3):
        with current_double().section() as calls:
            run(pair, rank)
        assert_grads(pair, expected, REORDERED)
        pair.zero_grad()
        # Per pass and model 3 in forward; the actor's backward 2, but for its last weight.
        assert count(calls)["all_gather"] == 2 * (3 + 3 + 1) + (1 if step == 0 else 0)


@on_ranks(2)
def test_weights_gathered_in_inference_mode_serve_training(rank, world):
    run = training_run("mlp")
    model = shard(CASES["mlp"].build())
    expected = plain_grads(CASES["mlp"].build, run, world)
    with torch.inference_mode():
        model(randn(4, 6))
        model.unshard()
    for _ in range(2):
        run(model, rank)
        assert_grads(model, expected)
        model.zero_grad()
