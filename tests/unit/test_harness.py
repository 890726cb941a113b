"""The harness must fail when it should: every check of it is shown a program that breaks the rule."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import RankError, RanksTimeout, current_double, run_ranks


def sum_of_ranks(rank, world, offset):
    total = torch.tensor([rank + offset])
    dist.all_reduce(total)
    return rank, world, total.item(), torch.rand(1).item()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_rank_returns_its_result(world):
    results = run_ranks(sum_of_ranks, world, 10)
    assert [result[:2] for result in results] == [(rank, world) for rank in range(world)]
    assert {result[2] for result in results} == {sum(range(world)) + 10 * world}


def test_random_numbers_are_the_same_on_all_ranks_and_in_every_call():
    drawn = [result[3] for _ in range(2) for result in run_ranks(sum_of_ranks, 2, 0)]
    assert len(set(drawn)) == 1


def process_ids(rank, world):
    threads = re.search(r"Threads:\s+(\d+)", Path(f"/proc/{os.getppid()}/status").read_text()).group(1)
    return os.getpid(), os.getppid(), int(threads), torch.get_num_threads()


def test_ranks_are_reused_and_forked_from_a_process_without_threads():
    first, second = run_ranks(process_ids, 2), run_ranks(process_ids, 2)
    assert first == second
    (_, server, threads, torch_threads), (_, other_server, *_) = first
    assert server == other_server != os.getpid()
    assert threads == 1
    assert torch_threads == 1


def fail_on(rank, world, failing):
    if rank in failing:
        local = {"rows": rank}
        assert local["rows"] == 10 + rank
    dist.barrier()


def test_an_exception_carries_the_rank_its_traceback_and_the_explained_assert():
    before = run_ranks(process_ids, 2)
    with pytest.raises(RankError, match=r"rank 1 of 2: AssertionError: assert 1 == \(10 \+ 1\)") as caught:
        run_ranks(fail_on, 2, (1,))
    assert caught.value.rank == 1
    assert isinstance(caught.value.error, AssertionError)
    assert 'assert local["rows"] == 10 + rank' in str(caught.value)
    assert "rank_worker.py" not in str(caught.value)
    after = run_ranks(process_ids, 2)
    assert not {row[0] for row in before} & {row[0] for row in after}, "a pool survived a failed call"


def test_of_several_failures_the_lowest_rank_is_raised():
    with pytest.raises(RankError, match="rank 1 of 4"):
        run_ranks(fail_on, 4, (3, 1))


def lose_peer(rank, world):
    if rank == 1:
        dist.destroy_process_group()  # closes the connections: rank 0 fails in its barrier
        time.sleep(0.5)
        raise KeyError("the cause")
    dist.barrier()


def test_the_victim_of_a_lost_peer_is_not_blamed():
    with pytest.raises(RankError, match="rank 1 of 2: KeyError: 'the cause'"):
        run_ranks(lose_peer, 2)


def end_process(rank, world):
    if rank == 1:
        os._exit(7)
    dist.barrier()


def test_a_rank_that_dies_is_reported():
    with pytest.raises(RankError, match="rank 1 of 2: the process ended with exit code 7"):
        run_ranks(end_process, 2)


def skip_a_collective(rank, world):
    if rank != 1:
        dist.barrier()
    else:
        time.sleep(600)


def test_a_hang_is_bounded_and_says_what_each_rank_was_doing():
    run_ranks(sum_of_ranks, 2, 0)  # this module is imported on the ranks before the time below runs
    with pytest.raises(RanksTimeout) as caught:
        run_ranks(skip_a_collective, 2, timeout=3)
    report = str(caught.value)
    first, second = report.split("rank 1: did not finish")
    assert "rank 0: did not finish" in first
    assert " in barrier" in first
    assert " in skip_a_collective" in second
    assert " in barrier" not in second
    assert run_ranks(sum_of_ranks, 2, 0)[0][2] == 1


@pytest.mark.slow
def test_ranks_do_not_outlive_a_parent_that_is_killed():
    program = """if 1:
        import os, signal
        from tests.harness import run_ranks
        from tests.unit.test_harness import process_ids
        print(*(row[0] for row in run_ranks(process_ids, 2)), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    root = Path(__file__).parents[2]
    child = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert child.returncode == -signal.SIGKILL, child.stderr
    ranks = [int(word) for word in child.stdout.split()]
    assert len(ranks) == 2
    deadline = time.monotonic() + 20
    while left := [pid for pid in ranks if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.1)


def test_a_function_that_ranks_cannot_import_is_refused():
    with pytest.raises(TypeError, match="not at the top level"):
        run_ranks(lambda rank, world: None, 2)


def leave_hooks(rank, world):
    torch._C._autograd._push_saved_tensors_default_hooks(lambda t: t, lambda t: t)


def leave_no_grad(rank, world):
    torch.set_grad_enabled(False)


@pytest.mark.parametrize(
    ("body", "message"), [(leave_hooks, "saved-tensor hooks"), (leave_no_grad, "gradients are disabled")]
)
def test_state_left_behind_is_an_error(body, message):
    with pytest.raises(RankError, match=f"left behind: {message}"):
        run_ranks(body, 1)


# ---- over the library


def library_log(rank, world, kind):
    collectives = pytest.importorskip("torch_gtp._collectives")
    if kind == "disagree":
        shapes = ((2, 3), (3, 2))[rank]
        for length in shapes:
            collectives.all_reduce(torch.ones(length), dist.new_group([rank]), "sum").wait()
        current_double().log[:] = [
            call._replace(group=(0, 1)) for call in current_double().log
        ]  # as if both groups were one
        return None
    handle = collectives.all_reduce(torch.ones(4), dist.group.WORLD, "sum")
    if kind == "hang" and rank == 0:
        collectives.all_reduce(torch.ones(9), dist.group.WORLD, "sum").wait()
    if kind != "leak":
        handle.wait()
    return str(current_double().log[0])


def test_the_library_runs_on_the_double_by_default():
    pytest.importorskip("torch_gtp._collectives")
    assert run_ranks(library_log, 2, "fine") == ["all_reduce sum float32[4] in group (0, 1)"] * 2
    with pytest.raises(RankError, match="no communication double is installed"):
        run_ranks(library_log, 2, "fine", double=False)


def test_a_leaked_handle_of_the_library_fails_the_call():
    pytest.importorskip("torch_gtp._collectives")
    with pytest.raises(RankError, match="left behind: its handle was dropped without wait"):
        run_ranks(library_log, 2, "leak")


def test_ranks_that_issue_different_collectives_fail_the_call():
    pytest.importorskip("torch_gtp._collectives")
    with pytest.raises(AssertionError, match=r"disagree about collective 0 .* float32\[2\] .* float32\[3\]"):
        run_ranks(library_log, 2, "disagree")


def test_a_hang_names_the_last_collective_of_each_rank():
    pytest.importorskip("torch_gtp._collectives")
    run_ranks(library_log, 2, "fine")
    with pytest.raises(RanksTimeout, match=r"rank 0: did not finish; last collective: #2 all_reduce sum float32\[9\]"):
        run_ranks(library_log, 2, "hang", timeout=3)
