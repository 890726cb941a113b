"""Every mistake is refused with a message that says where, what was found, and what to do."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.harness import cached_mesh, fake_world
from tests.unit.refusals import refuses
from torch_gtp import GTPModule, GTPPolicy, WeightPlan, gtp_shard, materialize_meta
from torch_gtp.debug import explain

ANY_SIZE = GTPPolicy(min_shard_numel=1)


@pytest.fixture(autouse=True)
def world():
    with fake_world(4) as double:
        yield double


def gtp_mesh():
    return cached_mesh((4,), ("gtp_remat",))


def mlp():
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 9))


def shard(model, **options):
    return gtp_shard(model, gtp_mesh(), **{"policy": ANY_SIZE, **options})


# ---- arguments


def test_the_module_is_a_module():
    with refuses(TypeError, "gtp_shard", "expected an nn.Module", "list"):
        gtp_shard([mlp()], gtp_mesh())


@pytest.mark.parametrize("container", [nn.ModuleList([nn.Linear(4, 4)]), nn.ModuleDict({"a": nn.Linear(4, 4)})])
def test_a_container_without_forward_is_refused(container):
    with refuses(ValueError, type(container).__name__, "without forward", "on its parent or its elements"):
        shard(container)


def test_the_mesh_is_a_mesh():
    with refuses(TypeError, "gtp_shard", "expected a DeviceMesh", "int"):
        gtp_shard(mlp(), 4)


def test_the_mesh_has_an_axis_to_gather_over():
    with refuses(ValueError, "('dp', 'gtp')", "'gtp_remat'", "torch_gtp.build_mesh"):
        gtp_shard(mlp(), cached_mesh((2, 2), ("dp", "gtp")))
    with refuses(ValueError, "None", "'gtp_remat'", "torch_gtp.build_mesh"):
        gtp_shard(mlp(), init_device_mesh("cpu", (4,)))


def test_the_policy_is_a_policy():
    with refuses(TypeError, "gtp_shard(policy=...)", "expected a GTPPolicy", "dict"):
        shard(mlp(), policy={"prefetch": False})


def test_keyword_arguments_are_keywords():
    with pytest.raises(TypeError, match="positional"):
        gtp_shard(mlp(), gtp_mesh(), ANY_SIZE)


def test_calling_twice_with_the_same_arguments_is_calling_once():
    model = shard(mlp())
    weight = model[0].weight
    assert shard(model) is model
    assert model[0].weight is weight


def test_calling_twice_with_another_policy_is_refused():
    model = shard(mlp())
    with refuses(ValueError, "gtp_shard(Sequential)", "twice", "other arguments", "call it once"):
        shard(model, policy=GTPPolicy(min_shard_numel=2))


def test_a_plan_for_what_is_sharded_already_is_refused():
    model = shard(mlp())
    with refuses(ValueError, "plan=...", "['0.weight']", "match no parameter"):
        shard(model, plan={"0.weight": WeightPlan(replicate=True)})


def test_calling_twice_with_another_mesh_is_refused():
    model = shard(mlp())
    with refuses(ValueError, "gtp_shard(Sequential)", "twice"):
        gtp_shard(model, cached_mesh((2, 2), ("dp", "gtp_remat")), policy=ANY_SIZE)


def test_a_refused_module_is_left_as_it_was():
    model = mlp()
    before = dict(model.named_parameters())
    with pytest.raises(ValueError):
        shard(model, plan={"9.weight": WeightPlan()})
    assert type(model) is nn.Sequential
    assert type(model[0]) is nn.Linear
    assert all(now is before[name] for name, now in model.named_parameters())
    assert isinstance(shard(model), GTPModule)


# ---- plans


def test_a_plan_key_that_matches_nothing_is_refused_with_the_names_there_are():
    with refuses(ValueError, "plan=...", "['2.bais', 'layers.*']", "'2.bias'"):
        shard(mlp(), plan={"2.bais": WeightPlan(), "layers.*": WeightPlan(), "2.weight": WeightPlan()})


@pytest.mark.parametrize("dim", [2, -3])
def test_a_plan_names_a_dim_that_is_there(dim):
    with refuses(ValueError, "0.weight", f"shard_dim={dim}", "(10, 6)", "name one of its dims"):
        shard(mlp(), plan={"0.weight": WeightPlan(shard_dim=dim)})


def test_a_negative_dim_counts_from_the_end():
    model = shard(mlp(), plan={"0.weight": WeightPlan(shard_dim=-1)})
    assert model[0].weight.placements == (Shard(1),)


def test_a_parameter_without_dims_cannot_be_forced_to_shard():
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    with refuses(ValueError, "scale", "()"):
        shard(model, plan={"scale": WeightPlan(replicate=False)})


def test_the_mesh_of_a_plan_has_an_axis_to_gather_over():
    plan = {"0.weight": WeightPlan(mesh=cached_mesh((4,), ("dp",)))}
    with refuses(ValueError, "0.weight", "WeightPlan(mesh=...)", "('dp',)", "'gtp_remat'"):
        shard(mlp(), plan=plan)


def test_zero_weights_are_refused_with_the_reason_for_each_parameter():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))
    plan = {"0.weight": WeightPlan(replicate=True)}
    with refuses(
        ValueError,
        "gtp_shard(Sequential): no weight would be sharded",
        "0.weight: the plan says replicate",
        "0.bias: 1-D",
        "1.weight: 1-D",
        "2.weight: 8 elements, fewer than min_shard_numel=9",
    ):
        shard(model, policy=GTPPolicy(min_shard_numel=9), plan=plan)
    with refuses(ValueError, "gtp_shard(GELU)", "the module has no parameters"):
        shard(nn.GELU())


# ---- parameters that cannot be sharded


def on_device(mesh_type):
    return DeviceMesh(mesh_type, [0, 1], mesh_dim_names=("gtp_remat",), _init_backend=False, _rank=0)


def test_parameters_are_on_the_device_of_the_mesh():
    with refuses(ValueError, "0.weight", "on cpu", "'cuda'", "move the module to the mesh's device type"):
        gtp_shard(mlp(), on_device("cuda"))


@pytest.mark.parametrize(
    ("make", "fragments"),
    [
        (lambda x: x.to(torch.complex64), ("complex dtype torch.complex64", "real and imaginary")),
        (lambda x: x.to_sparse(), ("quantized or sparse", "densify")),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), ("quantized or sparse", "dequantize")),
    ],
    ids=["complex", "sparse", "quantized"],
)
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation")
def test_storage_that_has_no_rows_to_split_is_refused(make, fragments):
    model = mlp()
    model[0].table = nn.Parameter(make(torch.eye(4)), requires_grad=False)
    with refuses(ValueError, "0.table", *fragments):
        shard(model)


def test_a_lazy_parameter_is_refused():
    with refuses(ValueError, "0.weight", "lazy", "run a forward once"):
        shard(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4)))


def test_a_parameter_with_a_gradient_is_refused():
    model = mlp()
    model(torch.ones(1, 6)).sum().backward()
    with refuses(ValueError, "0.weight", "has a gradient", "zero_grad()"):
        shard(model)


def test_a_dtensor_on_a_mesh_without_a_tensor_parallel_axis_is_refused():
    model = mlp()
    weight = distribute_tensor(model[0].weight.detach(), cached_mesh((4,), ("tp",)), [Shard(0)])
    model[0].weight = nn.Parameter(weight)
    with refuses(ValueError, "0.weight", "already a DTensor", "(Shard(dim=0),)", "axis 'tp' of its own mesh"):
        shard(model)


def test_a_dtensor_on_another_tensor_parallel_axis_is_refused():
    model = mlp()
    parallelize_module(model, cached_mesh((4,), ("tp",)), {"0": ColwiseParallel()})
    with refuses(ValueError, "0.weight", "already a DTensor", "axis 'tp' of its own mesh"):
        gtp_shard(model, cached_mesh((2, 2), ("tp", "gtp_remat")), policy=ANY_SIZE)


def test_a_tensor_parallel_split_that_is_not_torch_chunks_is_refused():
    mesh = cached_mesh((2, 2), ("tp", "gtp_remat"))
    model = mlp()
    uneven = DTensor.from_local(
        torch.zeros(7, 6), mesh["tp"], [Shard(0)], run_check=False, shape=torch.Size((10, 6)), stride=(6, 1)
    )
    model[0].weight = nn.Parameter(uneven)
    with refuses(ValueError, "0.weight", "(7, 6)", "torch.chunk"):
        gtp_shard(model, mesh, policy=ANY_SIZE)


class Keeps(nn.Module):
    """Has a parameter of its child among its attributes, in some container."""

    def __init__(self, put):
        super().__init__()
        self.inner = nn.Linear(6, 10)
        self.stash = put(self.inner.weight)


class Wrapper(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer


@pytest.mark.parametrize("put", [lambda w: [w], lambda w: (w,), lambda w: {"w": w}], ids=["list", "tuple", "dict"])
def test_a_second_reference_to_a_parameter_is_refused(put):
    with refuses(ValueError, "layer.inner.weight", "'stash' of layer (Keeps)", "remove that reference"):
        shard(Wrapper(Keeps(put)))


def test_a_parameter_hidden_in_the_instance_dict_is_refused():
    model = mlp()
    model.__dict__["first"] = model[0].weight
    with refuses(ValueError, "0.weight", "attribute 'first' of the module (Sequential)"):
        shard(model)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_write_their_weight_or_have_sparse_gradients_are_refused(kind):
    with refuses(ValueError, "0.weight", "sparse gradients", "sparse=False"):
        shard(nn.Sequential(kind(10, 4, sparse=True)))
    with refuses(ValueError, "0.weight", "max_norm", "after the optimizer step"):
        shard(nn.Sequential(kind(10, 4, max_norm=1.0)))


def test_ties_that_were_sharded_differently_are_refused():
    embed, head = nn.Embedding(12, 4), nn.Linear(4, 12, bias=False)
    head.weight = embed.weight
    model = Wrapper(nn.Sequential(embed, head))
    shard(embed)
    shard(head, plan={"weight": WeightPlan(shard_dim=1)})
    with refuses(ValueError, "layer.0.weight", "layer.1.weight", "sharded differently", "the same plan"):
        shard(model)


# ---- what looks odd and works


def test_a_non_contiguous_weight_is_sharded_from_a_contiguous_copy():
    model = nn.Sequential(nn.Linear(6, 8, bias=False))
    full = torch.arange(48.0).view(6, 8).t()
    model[0].weight = nn.Parameter(full)
    shard(model)
    local = model[0].weight.to_local()
    assert torch.equal(local, full[:2])
    assert local.is_contiguous()
    assert model[0].weight.stride() == (6, 1)


def test_a_sharded_weight_does_not_keep_the_full_one_alive():
    model = mlp()
    shard(model)
    assert model[0].weight.to_local().untyped_storage().nbytes() == 4 * 3 * 6


def test_attributes_flags_and_hooks_of_a_parameter_survive():
    model = mlp()
    seen = []
    model[0].weight.no_decay = "kept"
    model[0].bias.requires_grad_(False)
    model[0].weight.register_hook(lambda grad: seen.append("grad"))
    model[0].weight.register_post_accumulate_grad_hook(lambda param: seen.append("accumulated"))
    shard(model)
    assert model[0].weight.no_decay == "kept"
    assert not model[0].bias.requires_grad
    model(torch.ones(1, 6)).sum().backward()
    assert seen == ["grad", "accumulated"]


# ---- using a sharded model


def test_an_optimizer_from_before_sharding_is_refused_at_its_first_step():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shard(model)
    model(torch.ones(1, 6)).sum().backward()
    with refuses(ValueError, "SGD holds 0.weight", "as it was before", "after gtp_shard", "model.parameters()"):
        optimizer.step()


def test_an_optimizer_of_another_model_is_left_alone():
    other = mlp()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    shard(mlp())
    other(torch.ones(1, 6)).sum().backward()
    optimizer.step()


def test_forward_on_meta_parameters_is_refused():
    with torch.device("meta"):
        model = mlp()
    shard(model)
    for _ in range(2):
        with refuses(ValueError, "0.weight", "meta device", "torch_gtp.materialize_meta(model, seed)"):
            model(torch.ones(1, 6))
    materialize_meta(model, 0)
    model(torch.ones(1, 6)).sum().backward()


def test_materializing_a_module_that_cannot_initialise_itself_is_refused():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6, 6))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 6), Scale())
    shard(model)
    with refuses(ValueError, "materialize_meta", "1 (Scale)", "['weight']", "reset_parameters", "init=..."):
        materialize_meta(model, 0)


def test_wrapping_in_ddp_is_refused_with_the_line_to_write():
    model = shard(mlp())
    with refuses(TypeError, "DistributedDataParallel", "gtp_shard(model, mesh)", "replicate axis", "build_mesh("):
        nn.parallel.DistributedDataParallel(model)


@pytest.mark.parametrize(
    "attempt",
    [copy.deepcopy, copy.copy, pickle.dumps, lambda model: torch.save(model, io.BytesIO())],
    ids=["deepcopy", "copy", "pickle", "save"],
)
def test_copies_are_refused_with_the_recipe(attempt):
    model = shard(mlp())
    for module in (model, model[0]):
        with refuses(TypeError, "cannot be copied or pickled", "load_state_dict", "torch.distributed.checkpoint"):
            attempt(module)


def test_verbs_do_not_run_inside_a_forward():
    model = shard(mlp())

    class Calls(nn.Module):
        def __init__(self, what):
            super().__init__()
            self.what = what

        def forward(self, x):
            self.what()
            return x

    for name, what in (("unshard", model.unshard), ("gathered", lambda: model.gathered().__enter__())):
        model[1] = Calls(what)
        with refuses(ValueError, f"Sequential.{name}()", "inside a forward"):
            model(torch.ones(1, 6))


@pytest.mark.parametrize("name", ["set_requires_gradient_sync", "set_is_last_backward"])
def test_switches_of_a_model_take_bools_only(name):
    with refuses(TypeError, name, "expected a bool", "0"):
        getattr(shard(mlp()), name)(0)


def test_a_parameter_replaced_by_another_layout_is_refused_at_its_use():
    model = shard(mlp())
    model[0].weight = nn.Parameter(distribute_tensor(torch.zeros(10, 6), gtp_mesh(), [Replicate()]))
    with refuses(ValueError, "0.weight", "another layout", "(Replicate(),)", "(Shard(dim=0),)", "same layout"):
        model(torch.ones(1, 6))


def test_an_optimizer_step_on_gathered_weights_is_refused():
    model = shard(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 6)).sum().backward()
    with refuses(ValueError, "SGD.step() inside gathered()", "move the step out"):
        with model.gathered():
            optimizer.step()
    optimizer.step()


def test_a_weight_modified_between_forward_and_backward_is_refused():
    model = shard(mlp())
    loss = model(torch.ones(1, 6, requires_grad=True)).sum()
    with torch.no_grad():
        model[0].weight.zero_()
    with refuses(RuntimeError, "0.weight", "was modified", "between the forward and this backward"):
        loss.backward()


def test_a_step_between_forward_and_backward_is_refused():
    model = shard(mlp())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 6)).sum().backward()
    loss = model(torch.ones(1, 6, requires_grad=True)).sum()
    optimizer.step()
    with refuses(RuntimeError, "2.weight", "was modified", "optimizer step"):
        loss.backward()


def test_explaining_a_plain_model_is_refused():
    with refuses(ValueError, "explain(Sequential)", "not under gtp_shard"):
        explain(mlp())
