"""`Muon` on plain parameters, its groups, its state, and what it refuses."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from tests.harness import fake_world
from tests.models import CASES
from tests.unit.refusals import refuses
from torch_gtp.optim import Muon


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9, bias=False), nn.Linear(9, 4, bias=False))


def train(model, optimizer, steps=2):
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def assert_equal(left, right):
    assert all(map(torch.equal, left, right))


# ---- plain parameters and state


def test_plain_parameters_are_updated_as_by_pytorch():
    left, right = net(), net()
    assert_equal(train(left, Muon(left.parameters())), train(right, torch.optim.Muon(right.parameters())))


def test_adamw_groups_are_pytorchs_adamw_with_its_defaults():
    left, right = net(), net()
    group = {"params": left.parameters(), "algorithm": "adamw", "weight_decay": 0.01}
    assert_equal(train(left, Muon([group])), train(right, torch.optim.AdamW(right.parameters())))
    group = {"params": left.parameters(), "algorithm": "adamw", "betas": (0.8, 0.9), "eps": 1e-3}
    theirs = torch.optim.AdamW(right.parameters(), lr=0.1, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-3)
    assert_equal(train(left, Muon([group], lr=0.1, weight_decay=0.3)), train(right, theirs))


def test_the_state_of_pytorchs_muon_can_be_loaded():
    left, right = net(), net()
    theirs = torch.optim.Muon(right.parameters(), lr=0.05)
    train(right, theirs)
    mine = Muon(left.parameters())
    mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
    left.load_state_dict(right.state_dict())
    assert_equal(train(left, mine), train(right, theirs))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_trains_on_as_the_original(duplicate):
    model = net()
    optimizer = Muon(model.named_parameters(), segments={"0.weight": (4, 5)}, ns_dtype=torch.float32)
    train(model, optimizer)
    other, its_optimizer = duplicate((model, optimizer))
    expected = train(model, optimizer)
    assert_equal(train(other, its_optimizer), expected)
    with refuses(ValueError, "group 1", "ns_steps"):
        its_optimizer.add_param_group({"params": [("more", matrix())], "ns_steps": 0})


def test_a_closure_is_called_with_gradients_and_its_loss_returned():
    model = net()

    def closure():
        loss = model(torch.ones(1, 6)).sum()
        loss.backward()
        return loss

    before = model[0].weight.detach().clone()
    assert Muon(model.parameters()).step(closure).requires_grad
    assert not torch.equal(model[0].weight, before)


def test_learning_rate_schedules_reach_both_algorithms():
    model = CASES["mlp"].build()
    optimizer = Muon(Muon.groups_of(model), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


# ---- groups


def names_for_muon(model, **options):
    return [name for name, _ in Muon.groups_of(model, **options)[0]["params"]]


def test_hidden_matrices_are_for_muon_and_the_rest_for_adamw():
    model = CASES["attention_lm"].build()
    muon, adamw = Muon.groups_of(model)
    assert (muon["algorithm"], adamw["algorithm"]) == ("muon", "adamw")
    assert all(name.startswith("layers.") and "norm" not in name for name, _ in muon["params"])
    assert len(muon["params"]) == 14
    assert {"embed.weight", "head.weight", "norm.weight"} <= {name for name, _ in adamw["params"]}
    assert len(muon["params"]) + len(adamw["params"]) == len(list(model.parameters()))


def test_the_output_layer_of_transformers_is_found_whatever_it_is_called():
    model = CASES["hf_llama"].build()
    model.unlikely_name, model.get_output_embeddings = model.lm_head, lambda: model.unlikely_name
    del model.lm_head
    assert "unlikely_name.weight" not in names_for_muon(model)
    assert "model.layers.0.mlp.down_proj.weight" in names_for_muon(model)


def test_tied_heads_convolutions_and_frozen_parameters_are_not_for_muon():
    assert names_for_muon(CASES["tied_lm"].build()) == ["mlp.0.weight", "mlp.2.weight"]
    (group,) = Muon.groups_of(CASES["conv"].build())
    assert group["algorithm"] == "adamw"
    model = CASES["mlp"].build()
    model[0].requires_grad_(False)
    names = [name for group in Muon.groups_of(model) for name, _ in group["params"]]
    assert "0.weight" not in names
    assert "2.weight" in names


def test_stacks_are_for_muon_and_raw_embeddings_and_tokens_are_not():
    model = nn.Module()
    for name, shape in {
        "experts": (4, 6, 5), "pos_embed": (16, 8), "cls_token": (1, 1, 8), "patches": (1, 16, 8), "column": (7, 1),
    }.items():  # fmt: skip
        model.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    assert names_for_muon(model) == ["experts"]


def test_a_layer_in_a_list_may_be_called_output():
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Module()])
    model.layers[0].output = nn.Linear(4, 4, bias=False)
    model.output = nn.Linear(4, 9, bias=False)
    assert names_for_muon(model) == ["layers.0.output.weight"]


def test_patterns_name_more_parameters_for_adamw():
    model = CASES["attention_lm"].build()
    left = names_for_muon(model, adamw=["*.mlp.*", "layers.0.attention.o.weight"])
    assert left == [f"layers.{i}.attention.{n}.weight" for i in range(2) for n in "qkvo" if (i, n) != (0, "o")]
    with refuses(ValueError, "Muon.groups_of", "nothing.*", "match no parameter", "embed.weight"):
        Muon.groups_of(model, adamw="nothing.*")


# ---- refusals


def matrix(*shape, **options):
    return nn.Parameter(torch.ones(shape or (4, 4)), **options)


@pytest.mark.parametrize(
    ("options", "error", "fragments"),
    [
        ({"lr": -1.0}, ValueError, ["group 0", "lr", "-1.0"]),
        ({"lr": torch.ones(2)}, ValueError, ["lr", "(2,)"]),
        ({"weight_decay": -0.1}, ValueError, ["weight_decay", "-0.1"]),
        ({"momentum": -0.1}, ValueError, ["momentum", "-0.1"]),
        ({"momentum": float("nan")}, ValueError, ["momentum", "nan"]),
        ({"eps": -1.0}, ValueError, ["eps", "-1.0"]),
        ({"ns_steps": 0}, ValueError, ["ns_steps", "1 to 99", "got 0"]),
        ({"ns_steps": 100}, ValueError, ["ns_steps", "got 100"]),
        ({"ns_steps": 5.0}, TypeError, ["ns_steps", "5.0"]),
        ({"ns_coefficients": (1.0, 2.0)}, ValueError, ["ns_coefficients", "three"]),
        ({"adjust_lr_fn": "adam"}, ValueError, ["adjust_lr_fn", "match_rms_adamw", "'adam'"]),
        ({"ns_dtype": torch.float16}, ValueError, ["ns_dtype", "torch.bfloat16", "float16"]),
        ({"round_bytes": 0}, ValueError, ["round_bytes", "at least 1"]),
        ({"round_bytes": 1e9}, TypeError, ["round_bytes", "int"]),
        ({"segments": [4]}, TypeError, ["segments", "mapping", "list"]),
    ],
)
def test_wrong_options_are_refused(options, error, fragments):
    with refuses(error, "Muon", *fragments):
        Muon([matrix()], **options)


@pytest.mark.parametrize(
    ("group", "fragments"),
    [
        ({"algorithm": "sgd"}, ["algorithm", "'muon' or 'adamw'", "'sgd'"]),
        ({"algorithm": "adamw", "momentum": 0.9}, ["momentum", "mean nothing", "betas"]),
        ({"betas": (0.9, 0.99)}, ["betas", "mean nothing", "ns_steps"]),
        ({"algorithm": "adamw", "betas": (0.9, 1.0)}, ["betas", "(0.9, 1.0)"]),
    ],
)
def test_wrong_groups_are_refused_and_leave_nothing_behind(group, fragments):
    optimizer = Muon([matrix()])
    with refuses(ValueError, "Muon(group 1)", *fragments):
        optimizer.add_param_group({"params": [matrix()], **group})
    assert len(optimizer.param_groups) == 1


def test_parameters_that_are_no_matrices_are_named():
    with refuses(ValueError, "Muon(norm)", "2 or 3 dims", "algorithm='adamw'", "groups_of"):
        Muon([("weight", matrix()), ("norm", matrix(4))])
    with refuses(ValueError, "parameter 1 of group 0, shape (4,)", "groups_of"):
        Muon([matrix(), matrix(4)])
    with refuses(ValueError, "shape (2, 2)", "floating-point", "int64"):
        Muon([nn.Parameter(torch.ones(2, 2, dtype=torch.int64), requires_grad=False)])


@pytest.mark.parametrize(
    ("segments", "error", "fragments"),
    [
        ({"weights": (4,)}, ValueError, ["'weights' is not a parameter", "'weight'"]),
        ({"weight": (1, 2)}, ValueError, ["'weight'", "(1, 2)", "3 rows", "4 rows"]),
        ({"weight": (5, -1)}, ValueError, ["'weight'", "positive"]),
        ({"weight": (2.0, 2.0)}, TypeError, ["'weight'", "int"]),
        ({"norm": (4,)}, ValueError, ["'norm'", "algorithm='muon'"]),
    ],
)
def test_wrong_segments_are_refused(segments, error, fragments):
    groups = [
        {"params": [("weight", matrix())]},
        {"params": [("norm", matrix(4))], "algorithm": "adamw"},
    ]
    with refuses(error, "Muon(segments=...)", *fragments):
        Muon(groups, segments=segments)


def test_segments_by_name_need_names_and_by_parameter_do_not():
    weight = matrix()
    with refuses(ValueError, "'weight'", "have no names", "named_parameters()"):
        Muon([weight], segments={"weight": (2, 2)})
    with refuses(ValueError, "shape (4, 4)", "no group"):
        Muon([weight], segments={matrix(): (2, 2)})
    weight.grad = torch.randn(4, 4)
    halves = [nn.Parameter(half.clone()) for half in weight.detach().split(2)]
    for half, grad in zip(halves, weight.grad.split(2), strict=True):
        half.grad = grad.clone()
    Muon([weight], segments={weight: (2, 2)}).step()
    Muon(halves).step()
    assert torch.equal(weight, torch.cat(halves))


def test_gradients_that_cannot_be_read_are_refused():
    weight = matrix()
    weight.grad = torch.ones(4, 4).to_sparse()
    with refuses(ValueError, "shape (4, 4)", "sparse"):
        Muon([weight]).step()
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Replicate()]))
        weight.grad = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
        with refuses(ValueError, "Muon(w)", "Partial", "Replicate", "redistribute"):
            Muon([("w", weight)]).step()


def test_a_mesh_of_several_axes_without_names_is_refused():
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2))
        weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Replicate(), Replicate()]))
        weight.grad = torch.ones_like(weight)
        with refuses(ValueError, "Muon(w)", "without names", "mesh_dim_names"):
            Muon([("w", weight)]).step()
