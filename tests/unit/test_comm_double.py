"""Every rule of the communication double is shown a program that breaks it."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.comm_double import CommDouble, CommDoubleError
from tests.harness import RankError, cached_mesh, count, fake_world, run_ranks


def collectives() -> SimpleNamespace:
    """A stand-in for the library's module of collectives."""
    ops = {"avg": dist.ReduceOp.AVG, "sum": dist.ReduceOp.SUM}
    return SimpleNamespace(
        all_gather=lambda output, input, group: dist.all_gather_single(output, input, group=group, async_op=True),
        reduce_scatter=lambda output, input, group, op: dist.reduce_scatter_single(
            output, input, op=ops[op], group=group, async_op=True
        ),
        all_reduce=lambda tensor, group, op: dist.all_reduce(tensor, op=ops[op], group=group, async_op=True),
        all_to_all=lambda output, input, output_counts, input_counts, group: dist.all_to_all_single(
            output, input, output_counts, input_counts, group=group, async_op=True
        ),
    )


def double_results(rank, world):
    comm = collectives()
    shard = torch.arange(3.0) + 10 * rank
    with CommDouble(comm) as double:
        full = torch.empty(3 * world)
        handle = comm.all_gather(full, shard, dist.group.WORLD)
        assert full.isnan().all()
        handle.wait()
        handle.wait()  # a second wait has nothing to do
        assert full.tolist() == [10 * r + i for r in range(world) for i in range(3)]

        slots = torch.empty(world, 3)
        slots[rank] = shard
        comm.all_gather(slots.view(-1), slots[rank], dist.group.WORLD).wait()
        assert slots.view(-1).equal(full)

        part = torch.empty(3)
        comm.reduce_scatter(part, full, dist.group.WORLD, "avg").wait()
        assert part.equal(shard)

        total = torch.ones(5)
        comm.all_reduce(total, dist.group.WORLD, "sum").wait()
        assert total.tolist() == [world] * 5

        codes = torch.empty(2 * world, dtype=torch.uint8)
        handle = comm.all_gather(codes, torch.tensor([rank, 7], dtype=torch.uint8), dist.group.WORLD)
        assert codes.eq(0x7F).all()
        handle.wait()
        assert codes.tolist() == [x for r in range(world) for x in (r, 7)]

        # Rank r sends one element to rank 0 and r to rank 1, which therefore receives 0 and 1
        received = torch.empty(2 if rank == 0 else 1)
        handle = comm.all_to_all(
            received, torch.full((1 + rank,), float(rank)), [1, 1] if rank == 0 else [0, 1], [1, rank], dist.group.WORLD
        )
        assert received.isnan().all()
        handle.wait()
        assert received.tolist() == ([0.0, 1.0] if rank == 0 else [1.0])
    assert double.problems() == []
    assert comm.all_gather.__name__ == "<lambda>", "the module has its own functions back"
    return double.log


def test_the_double_delivers_results_and_logs_exact_bytes():
    log = run_ranks(double_results, 2)[0]
    assert count(log) == {"all_gather": 3, "reduce_scatter": 1, "all_reduce": 1, "all_to_all": 1}
    assert [call.nbytes for call in log] == [24, 24, 24, 20, 4, 8]
    assert [call.in_place for call in log] == [False, True, False, True, False, False]
    assert [call.reduction for call in log] == [None, None, "avg", "sum", None, None]
    assert {call.group for call in log} == {(0, 1)}
    assert str(log[2]) == "reduce_scatter avg float32[6] in group (0, 1)"
    assert str(log[5]) == "all_to_all float32 in group (0, 1)", "ranks may receive different amounts"


def missing_wait(rank, world):
    comm = collectives()
    with CommDouble(comm):
        weight = torch.empty(4, 2)
        handle = comm.all_gather(weight, torch.ones(4 // world, 2), dist.group.WORLD)
        early = nn.functional.linear(torch.ones(1, 2), weight)
        handle.wait()
        late = nn.functional.linear(torch.ones(1, 2), weight)
    return early.isnan().all().item(), late.sum().item()


def test_a_missing_wait_shows_as_nan():
    assert run_ranks(missing_wait, 2) == [(True, 8.0)] * 2


def write_in_flight(rank, world, target):
    comm = collectives()
    buffer, source = torch.empty(4), torch.ones(4 // world)
    tensors = {"input": source, "output": buffer}
    if target == "slot":
        source = tensors["slot"] = buffer[2 * rank : 2 * rank + 2]
    with CommDouble(comm) as double:
        handle = comm.all_gather(buffer, source, dist.group.WORLD)
        tensors[target][0] = 3.0
        with pytest.raises(CommDoubleError, match="while in flight") as caught:
            handle.wait()
    assert double.problems()
    return str(caught.value)


@pytest.mark.parametrize("target", ["input", "output", "slot"])
def test_a_buffer_that_is_written_in_flight_is_an_error(target):
    message = run_ranks(write_in_flight, 2, target)[0]
    assert ("input was modified" in message) == (target != "output")
    assert ("output was written" in message) == (target != "input")
    assert "all_gather float32[4] in group (0, 1)" in message
    assert re.search(r"\(issued at test_comm_double.py:\d+ write_in_flight\)", message)


def share_a_buffer(rank, world):
    comm = collectives()
    buffer = torch.empty(4)
    with CommDouble(comm):
        first = comm.all_gather(buffer, torch.ones(4 // world), dist.group.WORLD)
        second = comm.all_gather(buffer, torch.zeros(4 // world), dist.group.WORLD)
        first.wait()
        second.wait()


def test_two_gathers_in_one_buffer_are_an_error():
    with pytest.raises(RankError, match=r"CommDoubleError: all_gather .* output was written while in flight"):
        run_ranks(share_a_buffer, 2)


def leak_a_handle(rank, world, keep):
    comm = collectives()
    with CommDouble(comm) as double:
        handle = comm.all_reduce(torch.ones(2), dist.group.WORLD, "sum")
        if not keep:
            del handle
        return double.problems()


@pytest.mark.parametrize(("keep", "message"), [(True, "never waited for"), (False, "dropped without wait()")])
def test_a_handle_without_wait_is_a_problem(keep, message):
    (problem,) = run_ranks(leak_a_handle, 1, keep)[0]
    assert message in problem
    assert "all_reduce sum float32[2]" in problem
    assert "leak_a_handle" in problem


def test_a_collective_whose_sizes_do_not_fit_is_refused_before_it_is_issued():
    comm = collectives()
    with fake_world(4, double=False), CommDouble(comm):
        with pytest.raises(CommDoubleError, match=r"over 4 ranks: output torch.float32\[6\] does not fit"):
            comm.all_gather(torch.empty(6), torch.empty(2), dist.group.WORLD)
        with pytest.raises(CommDoubleError, match=r"over 4 ranks: output torch.float32\[5\] does not fit"):
            comm.all_to_all(torch.empty(5), torch.empty(4), [1, 1, 1, 1], [1, 1, 1, 1], dist.group.WORLD)


def test_gathered_memory_counts_as_alive_while_anything_holds_it():
    comm = collectives()
    with fake_world(2, double=False), CommDouble(comm) as double:
        buffers = [torch.empty(4), torch.empty(6)]
        for buffer in buffers:
            comm.all_gather(buffer, torch.ones(buffer.numel() // 2), dist.group.WORLD).wait()
        view = buffers[0].view(2, 2)[1:]
        assert double.live_bytes() == double.peak_bytes == 40
        buffers.clear()
        del buffer
        assert double.live_bytes() == 16
        del view
        assert (double.live_bytes(), double.peak_bytes) == (0, 40)


@pytest.mark.parametrize("world", [1, 3, 512])
def test_the_double_needs_no_peers_in_a_fake_world(world):
    comm = collectives()
    with fake_world(world, double=False), CommDouble(comm) as double:
        mesh = cached_mesh((world,), ("gtp_remat",))
        handle = comm.all_gather(torch.empty(2 * world), torch.ones(2), mesh.get_group())
        assert len(double.outstanding()) == 1
        handle.wait()
        with double.section() as calls:
            comm.reduce_scatter(torch.empty(2), torch.ones(2 * world), mesh.get_group(), "sum").wait()
        assert count(calls) == {"reduce_scatter": 1}
        assert double.counts() == {"all_gather": 1, "reduce_scatter": 1}
        assert double.log[0].group_size == world
        assert not double.problems()
    assert not dist.is_initialized()
