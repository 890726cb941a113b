"""Parts of shards on a mesh with every axis wider than one: what DTensor says of them is what they hold."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.dist.twin import local_part, on_ranks, shard
from tests.harness import cached_mesh
from torch_gtp.optim._split import Split, SplitMesh


@on_ranks(8)
def test_parts_are_cut_inside_of_every_other_split(rank, world):
    for names in (("dp", "tp", "gtp_remat"), ("dp", "gtp_remat", "tp"), ("gtp_remat", "dp", "tp")):
        mesh = cached_mesh((2, 2, 2), names)
        for rows in (8, 13, 17):
            full = torch.arange(rows * 5.0).view(rows, 5)
            model = nn.Sequential(nn.Linear(5, rows, bias=False), nn.Linear(rows, 5, bias=False))
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
            param = next(shard(model, mesh).parameters())
            split = Split.of(param, SplitMesh(mesh, ("dp",)), "0.weight")
            own = split.own(local_part(param, full))
            assert torch.equal(own, local_part(split.wrap(own), full)), (names, rows)
