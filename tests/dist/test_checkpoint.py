"""Checkpoints: what they hold, what saving and loading leave alone, and what goes wrong without harm."""

from __future__ import annotations

import functools
import inspect
import os
import pkgutil
import shutil
import signal
import tempfile
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.dist.twin import assert_local, on_ranks, randn, seeded, shard, training_run
from tests.harness import RankError, cached_mesh, run_ranks
from tests.models import CASES, MLP
from tests.reference import gather_full_dict
from torch_gtp.checkpoint import load, save

run_mlp = training_run("mlp")


def shared(path: str | os.PathLike) -> Path:
    """The folder of rank 0, on every rank."""
    folder = [str(path)]
    dist.broadcast_object_list(folder)
    return Path(folder[0])


def adamw(model: nn.Module, lr: float = 0.1) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def step(model, optimizer, coordinate, run=run_mlp):
    run(model, coordinate)
    optimizer.step()
    optimizer.zero_grad()


def locals_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, torch.Tensor]:
    """Copies of everything that this rank holds."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, param in model.named_parameters():
        for key, value in (optimizer.state.get(param, {}) if optimizer is not None else {}).items():
            found[f"{key} of {name}"] = value
    return {n: (t.to_local() if isinstance(t, DTensor) else t).detach().clone() for n, t in found.items()}


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    different = [name for name in actual if not torch.equal(actual[name], expected[name])]
    assert different == []


def in_folder(fn):
    """Give a test on ranks an empty folder that they share, after `rank` and `world`; it is removed at the end."""

    @functools.wraps(fn)
    def run(rank, world, *parameters):
        base = "/dev/shm" if Path("/dev/shm").is_dir() else None
        folder = shared(tempfile.mkdtemp(prefix="gtp-checkpoints-", dir=base) if rank == 0 else "")
        try:
            fn(rank, world, folder, *parameters)
            dist.barrier()
        finally:
            if rank == 0:
                shutil.rmtree(folder)

    first, second, _, *others = inspect.signature(fn).parameters.values()
    run.__signature__ = inspect.Signature([first, second, *others])
    return run


# ---- what saving and loading leave alone


@on_ranks(2)
@in_folder
def test_saving_evaluating_and_exporting_between_two_steps_leave_the_next_steps_bit_identical(rank, world, folder):
    from torch_gtp.checkpoint import export_hf

    def losses(between):
        model = shard(CASES["mlp"].build())
        optimizer = adamw(model)
        found = []
        for number in range(3):
            between(model, optimizer, number)
            loss = CASES["mlp"].loss(model, CASES["mlp"].batch(2 * rank + number))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found, locals_of(model, optimizer)

    def disturb(model, optimizer, number):
        # Before the first step too: there, get_state_dict of torch takes a step that counts in the bias correction
        save(folder / f"step-{number}", model, optimizer)
        with torch.no_grad():
            model(randn(4, 6))
        export_hf(model, folder / f"export-{number}")

    plain, disturbed = losses(lambda *_: None), losses(disturb)
    assert plain[0] == disturbed[0]
    assert_same(plain[1], disturbed[1])


@on_ranks(2)
@in_folder
def test_a_run_that_was_loaded_goes_on_bit_identically(rank, world, folder):
    model = shard(CASES["mlp"].build())
    optimizer = adamw(model)
    step(model, optimizer, rank)
    save(folder / "1", model, optimizer, extra={"step": 1, "nested": {"random": torch.get_rng_state()}, "none": None})
    step(model, optimizer, rank + 2)

    other = shard(CASES["mlp"].build(seed=5))
    others = adamw(other, lr=0.7)
    extra = load(folder / "1", other, others)
    assert extra["step"] == 1 and extra["none"] is None
    assert torch.equal(extra["nested"]["random"], torch.get_rng_state())
    step(other, others, rank + 2)
    assert_same(locals_of(other, others), locals_of(model, optimizer))


@on_ranks(2)
@in_folder
def test_weights_kept_by_unshard_are_not_used_after_a_load(rank, world, folder):
    source = shard(CASES["mlp"].build(seed=1))
    save(folder / "1", source)
    model = shard(CASES["mlp"].build(seed=2))
    model.unshard()
    load(folder / "1", model)
    assert torch.equal(model(randn(4, 6)), CASES["mlp"].build(seed=1)(randn(4, 6)))


# ---- no format of our own


@on_ranks(2)
@in_folder
def test_plain_dcp_reads_what_save_writes_and_load_reads_what_plain_dcp_writes(rank, world, folder):
    model = shard(CASES["mlp"].build())
    optimizer = adamw(model)
    step(model, optimizer, rank)
    save(folder / "ours", model, optimizer)
    theirs, their_optimizer = shard(CASES["mlp"].build(seed=3)), None
    their_optimizer = adamw(theirs, lr=0.9)
    model_state, optimizer_state = get_state_dict(theirs, their_optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder / "ours")
    set_state_dict(theirs, their_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert_same(locals_of(theirs, their_optimizer), locals_of(model, optimizer))
    assert their_optimizer.param_groups[0]["lr"] == 0.1

    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / "theirs")
    ours = shard(CASES["mlp"].build(seed=4))
    our_optimizer = adamw(ours, lr=0.9)
    assert load(folder / "theirs", ours, our_optimizer) == {}
    assert_same(locals_of(ours, our_optimizer), locals_of(model, optimizer))


@on_ranks(2)
def test_the_optimizer_is_laid_out_as_get_optimizer_state_dict_does_it(rank, world):
    from torch_gtp.checkpoint._dcp import _names, _optimizer_state

    model = shard(CASES["tied_lm"].build())
    optimizer = adamw(model)
    step(model, optimizer, rank, training_run("tied_lm"))
    ours = _optimizer_state(_names(model, optimizer, "test"), optimizer)
    theirs = get_optimizer_state_dict(model, optimizer)
    assert ours["param_groups"] == theirs["param_groups"]
    assert {(name, key) for name, entry in ours["state"].items() for key in entry} == {
        (name, key) for name, entry in theirs["state"].items() for key in entry
    }


# ---- what is written


@on_ranks(4)
@in_folder
def test_every_element_has_exactly_one_writer(rank, world, folder):
    """Replicas on dp, tp and gtp_remat are written once, and no rank writes everything."""
    model = CASES["mlp"].build()
    mesh = cached_mesh((2, 2), ("dp", "gtp_remat"))
    model = shard(model, mesh)
    save(folder / "1", model, adamw(model))
    metadata = FileSystemReader(folder / "1").read_metadata()
    chunks = {}
    for index, stored in metadata.storage_data.items():
        chunks.setdefault(index.fqn, []).append((tuple(index.offset or ()), stored.relative_path))
    for name, tensor in get_model_state_dict(model).items():
        offsets = [offset for offset, _ in chunks[f"model.{name}"]]
        assert len(set(offsets)) == len(offsets), name
        rows = metadata.state_dict_metadata[f"model.{name}"].chunks
        assert sum(chunk.sizes.numel() for chunk in rows) == tensor.numel(), name
    assert len({path for places in chunks.values() for _, path in places}) == world


@on_ranks(4)
@in_folder
def test_offsets_count_logical_rows_whatever_the_padding(rank, world, folder):
    """Ten rows over tp=2 and gtp_remat=2 are chunks of 3, 2, 3, 2: each gather pads, no checkpoint does."""
    for names in (("tp", "gtp_remat"), ("gtp_remat", "tp")):
        mesh = cached_mesh((2, 2), names)
        model = seeded(lambda: MLP(6, 10, 9))()
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        shard(model, mesh)
        save(folder / names[0], model)
        found = FileSystemReader(folder / names[0]).read_metadata().state_dict_metadata["model.0.weight"]
        assert sorted((c.offsets[0], c.sizes[0]) for c in found.chunks) == [(0, 3), (3, 2), (5, 3), (8, 2)]
        plain = MLP(6, 10, 9)
        load(folder / names[0], plain)
        assert torch.equal(plain[0].weight, seeded(lambda: MLP(6, 10, 9))()[0].weight)


@on_ranks(4)
@in_folder
def test_a_fused_projection_keeps_its_rows_in_order_across_topologies(rank, world, folder):
    """gate|up in one weight: shards of 4 ranks do not respect the halves, the checkpoint does."""
    full = torch.arange(2 * 7 * 3.0).view(14, 3)

    def build(mesh):
        model = nn.Sequential(nn.Linear(3, 14, bias=False))
        with torch.no_grad():
            model[0].weight.copy_(full)
        return shard(model, mesh)

    save(folder / "1", build(cached_mesh((4,), ("gtp_remat",))))
    other = build(cached_mesh((2, 2), ("dp", "gtp_remat")))
    with torch.no_grad():
        other[0].weight.zero_()
    load(folder / "1", other)
    assert_local(dict(other.named_parameters()), {"0.weight": full})


@on_ranks(2)
@in_folder
def test_a_second_save_is_as_complete_as_the_first(rank, world, folder):
    model = shard(CASES["mlp"].build())
    optimizer = adamw(model)
    step(model, optimizer, rank)
    save(folder / "1", model, optimizer)
    step(model, optimizer, rank)
    save(folder / "2", model, optimizer)
    first, second = (FileSystemReader(folder / n).read_metadata().state_dict_metadata for n in "12")
    assert first == second


# ---- parameters that the optimizer treats differently


@on_ranks(2)
@in_folder
def test_states_of_frozen_unused_and_fresh_parameters_survive(rank, world, folder):
    """Trained and then frozen: its state is kept. Never used: it has none, and gets none."""

    def build(seed):
        model = CASES["mlp"].build(seed)
        model.unused = nn.Module()
        model.unused.weight = nn.Parameter(torch.ones(3, 3))
        model.forward = lambda x: model[4](model[2](model[0](x)))
        return shard(model)

    def run(model, coordinate):
        model(randn(4, 6, seed=coordinate)).square().mean().backward()

    model = build(0)
    optimizer = adamw(model)
    run(model, rank)
    optimizer.step()  # with gradients left in place
    model[0].weight.requires_grad_(False)
    save(folder / "1", model, optimizer)
    assert len(optimizer.state) == 6

    other = build(1)
    other[0].weight.requires_grad_(False)
    run(other, rank)
    others = adamw(other)
    grads = {name: p.grad for name, p in other.named_parameters()}
    load(folder / "1", other, others)
    assert_same(locals_of(other, others), locals_of(model, optimizer))
    assert all(p.grad is grads[name] for name, p in other.named_parameters())


@on_ranks(2)
@in_folder
def test_groups_are_matched_by_their_parameters_and_a_mismatch_changes_nothing(rank, world, folder):

    def groups(model, lr):
        params = list(model.parameters())
        return [{"params": params[:2], "lr": lr}, {"params": params[2:], "lr": 2 * lr}]

    model = shard(CASES["mlp"].build())
    optimizer = torch.optim.AdamW(groups(model, 0.125))
    step(model, optimizer, rank)
    save(folder / "1", model, optimizer)
    other = shard(CASES["mlp"].build(seed=1))
    others = torch.optim.AdamW(groups(other, 0.5)[::-1])
    load(folder / "1", other, others)
    assert [group["lr"] for group in others.param_groups] == [0.25, 0.125]
    assert_same(locals_of(other, others), locals_of(model, optimizer))

    third = shard(CASES["mlp"].build(seed=2))
    thirds, before = adamw(third), locals_of(third)
    with pytest.raises(
        ValueError, match=r"no saved group has the parameters of group 0.*build the groups that were saved"
    ):
        load(folder / "1", third, thirds)
    assert_same(locals_of(third, thirds), before)


@on_ranks(4)
@in_folder
def test_the_state_of_muon_loads_on_another_topology(rank, world, folder):
    from torch_gtp.optim import Muon

    def build(seed, mesh, lr):
        model = shard(CASES["attention_lm"].build(seed), mesh)
        segments = {"layers.0.mlp.gate.weight": (20, 16)}
        return model, Muon(Muon.groups_of(model), lr=lr, segments=segments)

    model, optimizer = build(0, cached_mesh((4,), ("gtp_remat",)), 0.25)
    step(model, optimizer, rank, training_run("attention_lm"))
    save(folder / "1", model, optimizer)
    other, others = build(1, cached_mesh((2, 2), ("dp", "gtp_remat")), 0.5)
    load(folder / "1", other, others)
    assert [group["lr"] for group in others.param_groups] == [group["lr"] for group in optimizer.param_groups]
    for name, param in model.named_parameters():
        states, loaded = optimizer.state[param], others.state[other.get_parameter(name)]
        assert states.keys() == loaded.keys()
        assert_local(loaded, gather_full_dict(states), what=name)
    step(other, others, rank, training_run("attention_lm"))


@on_ranks(2)
@in_folder
def test_options_of_a_group_may_be_dicts_and_tensors(rank, world, folder):

    def build(lr, note):
        model = shard(CASES["mlp"].build())
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(lr), capturable=False, foreach=False)
        optimizer.param_groups[0]["note"] = note
        return model, optimizer

    save(folder / "1", *build(0.25, {"a": 1, "b": {"c": (2, 3)}}))
    model, optimizer = build(0.5, {"a": 0})
    load(folder / "1", model, optimizer)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["note"]) == (torch.tensor(0.25), {"a": 1, "b": {"c": (2, 3)}})


# ---- names and shapes


@on_ranks(2)
@in_folder
def test_missing_extra_and_wrong_shape_entries_are_named_and_change_nothing(rank, world, folder):
    save(folder / "1", shard(CASES["mlp"].build()))

    def refused(model, match, *more):
        before = locals_of(model)
        with pytest.raises(ValueError, match=match):
            load(folder / "1", model, *more)
        assert_same(locals_of(model), before)

    longer = shard(nn.Sequential(*CASES["mlp"].build(seed=1), nn.Linear(3, 3)))
    refused(longer, r"lacks: \['5\.weight', '5\.bias'\].*strict=False")
    before = locals_of(longer)
    load(folder / "1", longer, strict=False)
    after = locals_of(longer)
    assert torch.equal(after["5.weight"], before["5.weight"])
    assert not torch.equal(after["0.weight"], before["0.weight"])

    shorter = shard(nn.Sequential(*list(CASES["mlp"].build(seed=1))[:3]))
    refused(shorter, r"the model lacks: \['4\.weight', '4\.bias'\]")
    load(folder / "1", shorter, strict=False)
    plain = nn.Sequential(*list(CASES["mlp"].build())[:3])
    assert_local(dict(shorter.named_parameters()), dict(plain.named_parameters()))

    wider = shard(MLP(6, 12, 9, 3))
    refused(wider, r"0\.weight has shape \(10, 6\) in the checkpoint and \(12, 6\) in the model")
    model = shard(CASES["mlp"].build(seed=1))
    refused(model, r"no optimizer.*pass optimizer=None", adamw(model))
    with torch.device("meta"):
        on_meta = CASES["mlp"].build()
    with pytest.raises(ValueError, match=r"0\.weight is on the meta device; call materialize_meta"):
        load(folder / "1", shard(on_meta))


@on_ranks(2)
def test_load_state_dict_reports_names_and_shapes_as_nn_module_does(rank, world):
    model, plain = shard(CASES["mlp"].build()), CASES["mlp"].build()
    for module in (model, plain):
        state = dict(module.state_dict())
        state["6.weight"] = state.pop("4.weight")
        with pytest.raises(RuntimeError, match=r'(?s)Missing key.*"4\.weight".*Unexpected key.*"6\.weight"'):
            module.load_state_dict(state)
        result = module.load_state_dict(state, strict=False)
        assert (result.missing_keys, result.unexpected_keys) == (["4.weight"], ["6.weight"])
        state = dict(module.state_dict())
        state["0.weight"] = state["2.weight"]
        for strict in (True, False):
            with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
                module.load_state_dict(state, strict=strict)


@on_ranks(2)
def test_load_state_dict_with_assign_takes_the_tensors_themselves(rank, world):
    source, model = shard(CASES["mlp"].build(seed=1)), shard(CASES["mlp"].build(seed=2))
    state = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert model[0].weight.to_local().data_ptr() == state["0.weight"].to_local().data_ptr()
    assert torch.equal(model(randn(4, 6)), CASES["mlp"].build(seed=1)(randn(4, 6)))
    step(model, adamw(model), rank)


@on_ranks(1)
@in_folder
def test_bad_arguments_say_what_to_pass(rank, world, folder):
    model = CASES["mlp"].build()
    (folder / "taken").mkdir()
    (folder / "taken" / "file").touch()
    other = torch.optim.AdamW(CASES["mlp"].build().parameters())
    for error, match, call in (
        (ValueError, "exists and is not empty; choose a new folder", lambda: save(folder / "taken", model)),
        (TypeError, "expected a path, got int", lambda: save(3, model)),
        (TypeError, r"model=\.\.\.\): expected an nn.Module, got dict", lambda: save(folder / "1", {})),
        (TypeError, r"expected a torch.optim.Optimizer, got dict", lambda: load(folder / "1", model, {})),
        (TypeError, r"extra=\.\.\.\): expected a mapping, got int", lambda: save(folder / "1", model, extra=3)),
        (ValueError, r"is no parameter of the model; build the optimizer", lambda: save(folder / "1", model, other)),
        (ValueError, r"no checkpoint can be read there \(FileNotFoundError", lambda: load(folder / "none", model)),
    ):
        with pytest.raises(error, match=match):
            call()
    assert [path.name for path in folder.iterdir()] == ["taken"]
    dcp.save({"weights": torch.zeros(3)}, checkpoint_id=folder / "flat")
    with pytest.raises(ValueError, match=r"has no entry 'model', but \['weights'\]"):
        load(folder / "flat", model)


# ---- damage


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _scramble(path: Path) -> None:
    path.write_bytes(b"\0" * path.stat().st_size)


@pytest.mark.parametrize("damage", [Path.unlink, _truncate, _scramble], ids=["absent", "truncated", "zeros"])
@pytest.mark.parametrize("file", [".metadata", "__1_0.distcp"])
def test_a_damaged_checkpoint_is_an_error_on_every_rank_and_leaves_the_model_as_it_was(damage, file):
    load_damaged(damage=damage, file=file)


@on_ranks(2)
@in_folder
def load_damaged(rank, world, folder, damage, file):
    model = shard(CASES["mlp"].build())
    optimizer = adamw(model)
    step(model, optimizer, rank)
    save(folder / "1", model, optimizer)
    if rank == 0:
        damage(folder / "1" / file)
    dist.barrier()
    other = shard(CASES["mlp"].build(seed=1))
    others = adamw(other)
    step(other, others, rank)
    before = locals_of(other, others)
    with pytest.raises(ValueError, match="no checkpoint can be read" if file == ".metadata" else "as they were"):
        load(folder / "1", other, others)
    assert_same(locals_of(other, others), before)
    step(other, others, rank)


@on_ranks(2)
@in_folder
def test_an_error_of_one_rank_is_raised_on_all(rank, world, folder):
    save(folder / "1", shard(CASES["mlp"].build()))
    model = shard(CASES["mlp"].build(seed=1))
    before = locals_of(model)
    with pytest.raises(
        ValueError, match="no checkpoint can be read" if rank else "on rank 1: .*no checkpoint can be read"
    ):
        load(folder / ("1" if rank == 0 else "elsewhere"), model)
    assert_same(locals_of(model), before)


# ---- a save that is broken off, a save in the background

KILLS = {
    "while the data is written": "torch.distributed.checkpoint.filesystem._write_item",
    "before the metadata is written": "torch.distributed.checkpoint.FileSystemWriter.finish",
    "before the folder gets its name": "os.replace",
}


def save_and_die(rank, world, folder, target):
    """A whole save, then one in which every process that comes to `target` is killed, as by `kill -9`."""
    model = shard(CASES["mlp"].build(seed=1))
    save(f"{folder}/1", model)
    step(model, adamw(model), rank)
    calls = []

    def die(*args, **kwargs):
        calls.append(args)
        if len(calls) == (3 if target.endswith("_write_item") else 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    owner, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(owner)
    original = getattr(owner, name)
    setattr(owner, name, die)
    save(f"{folder}/2", model)
    raise AssertionError("nobody was killed")


def load_and_save_again(rank, world, folder):
    assert not Path(folder, "2").exists()
    assert Path(folder, ".2.partial").is_dir()
    model = shard(CASES["mlp"].build(seed=2))
    load(f"{folder}/1", model)
    assert_local(dict(model.named_parameters()), dict(CASES["mlp"].build(seed=1).named_parameters()))
    save(f"{folder}/2", model)
    load(f"{folder}/2", model)
    assert sorted(os.listdir(folder)) == ["1", "2"]


@pytest.mark.parametrize("target", KILLS.values(), ids=KILLS)
def test_processes_killed_during_a_save_leave_the_previous_checkpoint_and_no_half_one(tmp_path, target):
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(save_and_die, 2, str(tmp_path), target)
    run_ranks(load_and_save_again, 2, str(tmp_path))


def replace_and_die(rank, world, folder, fatal_rename):
    model = shard(CASES["mlp"].build(seed=1))
    save(f"{folder}/1", model)
    renames, rename = [], os.replace

    def die(*args):
        renames.append(args)
        if len(renames) == fatal_rename:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(*args)

    os.replace = die
    save(f"{folder}/1", shard(CASES["mlp"].build(seed=2)), overwrite=True)
    raise AssertionError("nobody was killed")


def load_and_replace_again(rank, world, folder):
    model = shard(CASES["mlp"].build(seed=3))
    for seed in (1, 4):
        load(f"{folder}/1", model)
        assert_local(dict(model.named_parameters()), dict(CASES["mlp"].build(seed=seed).named_parameters()))
        save(f"{folder}/1", shard(CASES["mlp"].build(seed=4)), overwrite=True)
        assert os.listdir(folder) == ["1"]


@pytest.mark.parametrize("fatal_rename", [1, 2])
def test_processes_killed_while_a_checkpoint_is_replaced_leave_the_one_that_was_there(tmp_path, fatal_rename):
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(replace_and_die, 2, str(tmp_path), fatal_rename)
    run_ranks(load_and_replace_again, 2, str(tmp_path))


@on_ranks(2)
@in_folder
def test_an_asynchronous_save_holds_the_values_of_its_call_while_training_goes_on(rank, world, folder):
    trained = threading.Event()

    class Late(dcp.FileSystemWriter):
        def write_data(self, plan, planner):
            assert trained.wait(30)
            return super().write_data(plan, planner)

    model = shard(CASES["mlp"].build())
    optimizer = adamw(model)
    step(model, optimizer, rank)
    before = locals_of(model, optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    # A group of its own: the saving thread communicates while training does
    future = dcp.async_save(
        {"model": model_state, "optimizer": optimizer_state},
        storage_writer=Late(folder / "1"),
        process_group=dist.new_group(backend="gloo"),
    )
    for _ in range(2):
        step(model, optimizer, rank)
    after = locals_of(model, optimizer)
    trained.set()
    future.result()
    assert_same(locals_of(model, optimizer), after)
    other = shard(CASES["mlp"].build(seed=1))
    others = adamw(other)
    load(folder / "1", other, others)
    assert_same(locals_of(other, others), before)
    assert not torch.equal(before["0.weight"], after["0.weight"])


@on_ranks(2)
@in_folder
def test_loading_takes_the_memory_of_this_ranks_shards_once_more(rank, world, folder):
    """Fresh tensors for all that is read, and nothing of the size of a full weight."""
    model = shard(MLP(64, 256, 64))
    optimizer = adamw(model)
    model(randn(4, 64)).sum().backward()
    optimizer.step()
    save(folder / "1", model, optimizer)
    stored = sum(tensor.nbytes for tensor in locals_of(model, optimizer).values())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        load(folder / "1", model, optimizer)
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    shard_bytes = 64 * 128 * 4  # dcp holds two while it reads: the one before and the one that comes
    assert stored <= peak <= stored + 2 * shard_bytes + 8192, (stored, peak)
