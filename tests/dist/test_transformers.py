"""Models of transformers, parallelized by their own tensor-parallel plan and then sharded, equal the plain ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.harness import cached_mesh, current_double, run_ranks, state_leaks
from tests.models import hf_llama, hf_qwen3
from tests.parity import adamw
from tests.reference import assert_matches, gather_full_dict, reference_step, relative_error
from torch_gtp import GTPPolicy, gtp_shard, materialize_meta

# Tensor parallelism adds the parts of every row-parallel product in another order, in each of two layers and three
# steps. Gradients of q and k, small differences of large terms, show it most: up to 1.8e-6 of their largest element.
RTOL = 4e-6
STEPS = 3

MODELS = {
    "llama": (hf_llama, {}),
    "llama_tied": (hf_llama, {"tie_word_embeddings": True}),
    "qwen3": (hf_qwen3, {"tie_word_embeddings": False}),
    "qwen3_tied": (hf_qwen3, {}),
}
# transformers wants vocabularies and heads that divide by tp; the rows of everything else split unevenly
SIZES = {"vocab_size": 32, "intermediate_size": 42}

MESHES = {
    "tp2-gtp2": ((2, 2), ("tp", "gtp_remat")),
    "gtp2-tp2": ((2, 2), ("gtp_remat", "tp")),
    "gtp4": ((4,), ("gtp_remat",)),
}


def build(name):
    make, options = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make(**{**SIZES, **options})


def parallelize(model, mesh):
    """As `from_pretrained` does it: the plan names every weight, so ties come after it."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    if "tp" in mesh.mesh_dim_names:
        if model.config.tie_word_embeddings:
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        apply_tensor_parallelism(model, mesh["tp"], model._expand_parallel_plan(model.tp_plan))
        model.tie_weights()
    return model


def sharded(model, mesh):
    return gtp_shard(parallelize(model, mesh), mesh, policy=GTPPolicy(min_shard_numel=1))


def batch(step, coordinate):
    generator = torch.Generator().manual_seed(100 * step + coordinate)
    return torch.randint(0, SIZES["vocab_size"], (2, 8), generator=generator)


def loss_of(model, ids):
    return model(input_ids=ids, labels=ids).loss


# ---- training


def train(rank, world, name, mesh_name):
    mesh = cached_mesh(*MESHES[mesh_name])
    coordinate = mesh.get_local_rank("gtp_remat")
    model = sharded(build(name), mesh)
    optimizer, double = adamw(model.parameters()), current_double()
    losses, grads = [], []
    for step in range(STEPS):
        loss = loss_of(model, batch(step, coordinate))
        loss.backward()
        losses.append(loss.item())
        assert not (leaks := state_leaks(double)), leaks
        found = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        grads.append(gather_full_dict(found))
        optimizer.step()
        optimizer.zero_grad()
    params = gather_full_dict(dict(model.named_parameters()))
    return coordinate, losses, (grads, params) if rank == 0 else None


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("llama", "gtp2-tp2"), ("llama_tied", "tp2-gtp2"), ("qwen3", "tp2-gtp2"), ("qwen3_tied", "gtp2-tp2")],
)
def test_training_on_the_models_own_tensor_parallel_plan_equals_the_plain_model(name, mesh):
    outcomes = run_ranks(train, 4, name, mesh)
    batches = [[[batch(step, coordinate) for coordinate in range(2)]] for step in range(STEPS)]
    expected = reference_step(lambda: build(name), batches, adamw, loss_of)
    for coordinate, losses, _ in outcomes:
        theirs = torch.tensor([step[0][coordinate] for step in expected.losses])
        assert relative_error(torch.tensor(losses), theirs) <= RTOL
    grads, params = outcomes[0][2]
    for step in range(STEPS):
        assert_matches(grads[step], expected.grads[step], RTOL, f"gradients of step {step}")
    assert_matches(params, expected.params, RTOL, f"parameters after {STEPS} steps")


# ---- inference


def infer(rank, world, name, mesh_name):
    model = sharded(build(name), cached_mesh(*MESHES[mesh_name]))
    ids = batch(0, 0)
    outputs = {}
    model.eval()
    outputs["eval"] = model(ids).logits.detach()
    with torch.no_grad():
        outputs["eval, no_grad"] = model(ids).logits
        model.train()
        outputs["train, no_grad"] = model(ids).logits
    with torch.inference_mode():
        outputs["inference_mode"] = model(ids).logits.clone()
    outputs["train, after all that"] = model(ids).logits.detach()
    return {key: out.full_tensor() if isinstance(out, DTensor) else out for key, out in outputs.items()}


@pytest.mark.parametrize(("name", "mesh"), [("llama", "tp2-gtp2"), ("qwen3_tied", "gtp2-tp2"), ("qwen3_tied", "gtp4")])
def test_outputs_in_every_mode_equal_the_plain_models(name, mesh):
    with torch.no_grad():
        expected = build(name)(batch(0, 0)).logits
    for outputs in run_ranks(infer, 4, name, mesh):
        for mode, logits in outputs.items():
            assert relative_error(logits, expected) <= RTOL, mode


def continue_text(model, mine):
    with torch.no_grad():
        return model.generate(batch(7, mine)[:1], max_new_tokens=2 + 3 * mine, do_sample=False).tolist()


def generate(rank, world, mesh_name):
    """Every rank of a gather group continues another prompt, to another length."""
    mesh = cached_mesh(*MESHES[mesh_name])
    model = sharded(build("llama"), mesh).eval()
    mine = mesh.get_local_rank("gtp_remat")
    with model.gathered():
        return mine, continue_text(model, mine)


@pytest.mark.parametrize("mesh", ["tp2-gtp2", "gtp4"])
def test_ranks_generate_texts_of_different_lengths_inside_gathered(mesh):
    model = build("llama").eval()
    for mine, tokens in run_ranks(generate, 4, mesh):
        assert tokens == continue_text(model, mine)


# ---- initialisation


def build_on_meta(name):
    make, options = MODELS[name]
    with torch.device("meta"):
        return make(**{**SIZES, **options})


def named_tensors(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def materialized(rank, world, name, mesh_name):
    model = sharded(build_on_meta(name), cached_mesh(*MESHES[mesh_name]))
    materialize_meta(model, seed=3, init=model._init_weights)
    after = torch.rand(1).item()
    assert not any(tensor.is_meta for tensor in named_tensors(model).values())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == model.config.tie_word_embeddings
    full = gather_full_dict(named_tensors(model))
    return full if rank == 0 else None, after


def plainly_materialized(name):
    """The loop that `materialize_meta` documents, on the plain model."""
    model = build_on_meta(name)
    memory: dict[int, nn.Parameter] = {}
    torch.manual_seed(3)
    for module in model.modules():
        for key, param in module._parameters.items():
            if param is not None:
                fresh = nn.Parameter(torch.empty_like(param, device="cpu"))
                module._parameters[key] = memory.setdefault(id(param), fresh)
        for key, buffer in module._buffers.items():
            module._buffers[key] = torch.empty_like(buffer, device="cpu")
        model._init_weights(module)
    return named_tensors(model), torch.rand(1).item()


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("llama", "gtp4"), ("llama", "tp2-gtp2"), ("qwen3_tied", "gtp4"), ("qwen3_tied", "gtp2-tp2")],
)
def test_a_materialized_model_has_the_bits_of_the_plain_one(name, mesh):
    with torch.random.fork_rng(devices=[]):
        expected, random_after = plainly_materialized(name)
    assert any("inv_freq" in key for key in expected)
    outcomes = run_ranks(materialized, 4, name, mesh)
    assert_matches(outcomes[0][0], expected, 0.0, "parameters and buffers")
    # The random numbers that follow are the same on every rank too
    assert {after for _, after in outcomes} == {random_after}
