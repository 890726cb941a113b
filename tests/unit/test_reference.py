"""The oracle agrees with PyTorch where PyTorch is right, and refuses shards that do not fit together."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from tests.harness import cached_mesh, run_ranks
from tests.models import CASES
from tests.reference import (
    assert_matches,
    gather_full,
    gather_full_dict,
    reassemble,
    reference_step,
    relative_error,
    shard_region,
    split_local,
    split_order,
)

LAYOUTS = {
    "tp,gtp-column": ((2, 2), ("tp", "gtp_remat"), (Shard(0), Shard(0))),
    "tp,gtp-row": ((2, 2), ("tp", "gtp_remat"), (Shard(1), Shard(0))),
    "gtp,tp-column": ((2, 2), ("gtp_remat", "tp"), (_StridedShard(0, split_factor=2), Shard(0))),
    "gtp,tp-row": ((2, 2), ("gtp_remat", "tp"), (Shard(0), Shard(1))),
    "dp,gtp": ((2, 2), ("dp", "gtp_remat"), (Replicate(), Shard(0))),
    "dim1": ((2, 2), ("tp", "gtp_remat"), (Shard(0), Shard(1))),
    "gtp4": ((4,), ("gtp_remat",), (Shard(0),)),
}


def tp_outer_gtp_inner(full, names, coordinate, sizes, tp_dim, gtp_dim):
    """The rule of the design, written down a second time: `torch.chunk` over tp, then over gtp_remat."""
    for axis, dim in (("tp", tp_dim), ("gtp_remat", gtp_dim)):
        if axis in names and dim is not None:
            index, parts = coordinate[names.index(axis)], sizes[names.index(axis)]
            chunks = torch.chunk(full, parts, dim)
            full = chunks[index] if index < len(chunks) else full.narrow(dim, 0, 0)
    return full


def round_trip(rank, world, layout):
    sizes, names, placements = LAYOUTS[layout]
    mesh = cached_mesh(sizes, names)
    coordinate = mesh.get_coordinate()
    dims = dict(zip(names, [getattr(placement, "dim", None) for placement in placements], strict=True))
    for rows in (8, 10, 9, 3, 1):
        full = torch.arange(rows * 5, dtype=torch.float32).view(rows, 5) + 1
        local = tp_outer_gtp_inner(full, names, coordinate, sizes, dims.get("tp"), dims["gtp_remat"])
        assert local.equal(split_local(full, sizes, placements, coordinate)), rows
        spec = DTensorSpec(mesh, placements, TensorMeta(full.shape, full.stride(), full.dtype))
        assert gather_full(DTensor(local.contiguous(), spec, requires_grad=False)).equal(full), rows


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather_full_gives_back_even_uneven_and_empty_shards(layout):
    run_ranks(round_trip, 4, layout)


def gathered_like_torch(rank, world):
    mesh = cached_mesh((2, 2), ("dp", "tp"))
    full = torch.arange(40.0).view(10, 4)
    for placements in ([Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(1), Replicate()]):
        tensor = distribute_tensor(full, mesh, placements)
        assert gather_full(tensor).equal(tensor.full_tensor()), placements
    total = DTensor.from_local(torch.full((3,), float(rank)), mesh, [Partial(), Partial()])
    assert gather_full(total).tolist() == [6.0] * 3
    mean = DTensor.from_local(torch.full((3,), float(rank)), mesh, [Partial("avg"), Shard(0)])
    assert gather_full(mean).tolist() == [1.0] * 3 + [2.0] * 3


def test_gather_full_agrees_with_torch_where_torch_is_right():
    run_ranks(gathered_like_torch, 4)


def different_replicas(rank, world):
    mesh = cached_mesh((2,), ("gtp_remat",))
    tensors = {"norm": DTensor.from_local(torch.ones(2) + rank, mesh, [Replicate()])}
    with pytest.raises(AssertionError, match=r"norm: coordinate .* holds another replica"):
        gather_full_dict(tensors)
    with pytest.raises(AssertionError, match="bias: rank 1 holds another replica than rank 0"):
        gather_full_dict({"bias": torch.ones(2) + rank})


def test_replicas_that_differ_are_an_error():
    run_ranks(different_replicas, 2)


def test_shards_of_the_wrong_shape_or_number_are_an_error():
    pieces = [((0,), torch.zeros(2, 3)), ((1,), torch.zeros(2, 3))]
    with pytest.raises(AssertionError, match=r"coordinate \(0,\) of \(2,\) holds \(2, 3\)"):
        reassemble("w", (5, 3), (2,), (Shard(0),), pieces)
    with pytest.raises(AssertionError, match="1 pieces for a mesh"):
        reassemble("w", (4, 3), (2,), (Shard(0),), pieces[:1])


def test_split_order_puts_strided_shards_inside_of_the_axes_to_their_right():
    strided = [_StridedShard(0, split_factor=6), _StridedShard(0, split_factor=3), Shard(0)]
    assert split_order(0, (5, 2, 3), strided) == [2, 1, 0]
    assert split_order(0, (5, 2, 3), [Shard(0), _StridedShard(0, split_factor=3), Shard(0)]) == [0, 2, 1]
    assert split_order(1, (5, 2, 3), strided) == []
    column = [_StridedShard(0, split_factor=2), Shard(0)]
    assert shard_region((10, 4), (2, 2), column, (0, 0)) == ((0, 3), (0, 4))
    assert shard_region((10, 4), (2, 2), column, (1, 0)) == ((3, 2), (0, 4))
    with pytest.raises(AssertionError, match="split factor 3 fits no axes"):
        split_order(0, (2, 2), [_StridedShard(0, split_factor=3), Shard(0)])


def train_with_ddp(rank, world):
    case = CASES["mlp"]
    model = case.build()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    grads = []
    for step in range(3):
        for micro in range(2):
            case.loss(parallel, case.batch(100 * step + 10 * micro + rank)).backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return grads, {name: p.detach().clone() for name, p in model.named_parameters()}


def test_the_reference_trains_like_distributed_data_parallel():
    case = CASES["mlp"]
    batches = [
        [[case.batch(100 * step + 10 * micro + rank) for rank in range(2)] for micro in range(2)] for step in range(3)
    ]
    optimizer = lambda params: torch.optim.AdamW(params, lr=1e-2)  # noqa: E731
    expected = reference_step(case.build, batches, optimizer, case.loss)
    summed = reference_step(case.build, batches[:1], optimizer, case.loss, reduction="sum")
    assert relative_error(summed.grads[0]["0.weight"], 2 * expected.grads[0]["0.weight"]) == 0
    for grads, params in run_ranks(train_with_ddp, 2):
        for ours, theirs in zip(grads, expected.grads, strict=True):
            assert_matches(ours, theirs, 1e-6, "gradients")
        assert_matches(params, expected.params, 1e-6, "parameters")


def test_assert_matches_names_what_is_wrong():
    with pytest.raises(AssertionError, match=r"params: missing \['b'\], unexpected \['c'\]"):
        assert_matches({"a": torch.ones(1), "c": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)}, 0, "params")
    with pytest.raises(AssertionError, match=r"grads: relative error above 1e-06: a 1.00e\+00, nan nan"):
        assert_matches(
            {"a": torch.zeros(2), "nan": torch.tensor([float("nan")]), "ok": torch.ones(1)},
            {"a": torch.ones(2), "nan": torch.ones(1), "ok": torch.ones(1)},
            1e-6,
            "grads",
        )
