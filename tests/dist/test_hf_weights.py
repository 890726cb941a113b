"""Weights of Hugging Face folders: read by slices, written without a full model, the same logits on both sides."""

from __future__ import annotations

import contextlib
import json
import os
import tracemalloc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.dist.test_transformers import MESHES, RTOL, batch, build, parallelize
from tests.dist.twin import assert_local, on_ranks
from tests.harness import cached_mesh, run_ranks
from tests.models import CASES, MLP
from tests.reference import assert_matches, gather_full_dict, relative_error
from torch_gtp import GTPPolicy, WeightPlan, gtp_shard, materialize_meta
from torch_gtp.checkpoint import export_hf, load_hf

ALL_MESHES = {**MESHES, "gtp2": ((2,), ("gtp_remat",)), "dp2-gtp2": ((2, 2), ("dp", "gtp_remat"))}


def emptied(name, mesh_name, plan=None):
    """A sharded model of zeros."""
    mesh = cached_mesh(*ALL_MESHES[mesh_name])
    model = gtp_shard(parallelize(build(name), mesh), mesh, policy=GTPPolicy(min_shard_numel=1), plan=plan)
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().zero_()
    return model


def loaded(rank, world, name, mesh_name, folder, plan_dim):
    plan = (lambda fqn, p: WeightPlan(shard_dim=plan_dim) if p.ndim > 1 else None) if plan_dim else None
    model = emptied(name, mesh_name, plan)
    load_hf(model, folder)
    assert_local(dict(model.named_parameters()), dict(build(name).named_parameters()))
    with torch.no_grad():
        logits = model(batch(0, 0)).logits
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


WHERE = [
    (name, mesh, 0) for name in ("llama", "qwen3_tied") for mesh in ("gtp2", "gtp4", "tp2-gtp2", "gtp2-tp2")
] + [("llama", "tp2-gtp2", 1), ("llama_tied", "dp2-gtp2", 0)]  # fmt: skip


def world_of(mesh):
    return 2 if mesh == "gtp2" else 4


@pytest.mark.parametrize(("name", "mesh", "dim"), WHERE)
@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_a_folder_of_transformers_loads_by_slices_into_any_layout(tmp_path, name, mesh, dim, shard_size):
    plain = build(name)
    plain.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "20KB")
    with torch.no_grad():
        expected = plain(batch(0, 0)).logits
    for logits in run_ranks(loaded, world_of(mesh), name, mesh, str(tmp_path), dim):
        assert relative_error(logits, expected) <= RTOL


# ---- writing


def exported(rank, world, name, mesh_name, folder, size):
    mesh = cached_mesh(*ALL_MESHES[mesh_name])
    model = gtp_shard(parallelize(build(name), mesh), mesh, policy=GTPPolicy(min_shard_numel=1))
    export_hf(model, folder, max_shard_size=size)
    other = emptied(name, mesh_name)
    load_hf(other, folder)
    for (key, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.to_local(), theirs.to_local()), key


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("llama", "gtp2"),
        ("llama", "tp2-gtp2"),
        ("qwen3_tied", "gtp2"),
        ("qwen3_tied", "gtp2-tp2"),
        ("qwen3", "dp2-gtp2"),
    ],
)
@pytest.mark.parametrize("size", [5 * 10**9, 12_000])
def test_an_exported_folder_has_the_weights_bit_by_bit_and_loads_in_transformers(tmp_path, name, mesh, size):
    from transformers import AutoModelForCausalLM

    run_ranks(exported, world_of(mesh), name, mesh, str(tmp_path / "export"), size)
    files = sorted((tmp_path / "export").glob("*.safetensors"))
    assert (len(files) > 4) == (size == 12_000)  # more files than ranks
    if size == 12_000:
        index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == {path.name for path in files}
        assert index["metadata"]["total_size"] == sum(p.nbytes for p in build(name).parameters())
        assert all(path.stat().st_size < size + 2000 for path in files)
    plain = build(name)
    with torch.no_grad():
        for back in (AutoModelForCausalLM.from_pretrained(tmp_path / "export"),):
            assert type(back) is type(plain)
            assert_matches(dict(back.named_parameters()), dict(plain.named_parameters()), 0.0, "parameters")
            assert torch.equal(back(batch(0, 0)).logits, plain(batch(0, 0)).logits)


def exported_in(rank, world, folder):
    mesh = cached_mesh(*ALL_MESHES["tp2-gtp2"])
    model = gtp_shard(parallelize(build("llama"), mesh), mesh, policy=GTPPolicy(min_shard_numel=1))
    export_hf(model, folder, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    load_hf(model, folder)
    rounded = {name: p.bfloat16().float() for name, p in build("llama").named_parameters()}
    assert_local(dict(model.named_parameters()), rounded)


def test_dtypes_are_converted_on_the_way_out_and_in(tmp_path):
    from transformers import AutoModelForCausalLM

    run_ranks(exported_in, 4, str(tmp_path / "export"))
    written = json.loads((tmp_path / "export" / "config.json").read_text())
    assert (written["dtype"], written["architectures"]) == ("bfloat16", ["LlamaForCausalLM"])
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert back.config.dtype == torch.bfloat16 == back.lm_head.weight.dtype
    assert torch.equal(back.lm_head.weight, build("llama").lm_head.weight.bfloat16())


def uneven(rank, world, folder, names):
    """Rows that do not divide, rows for some ranks only, columns, experts, a scalar, a buffer, other dtypes."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = MLP(5, 7, 3)
            self.rows = nn.Parameter(torch.rand(2, 5).bfloat16())
            self.columns = nn.Parameter(torch.rand(4, 5))
            self.experts = nn.Parameter(torch.rand(3, 5, 2))
            self.scale = nn.Parameter(torch.tensor(0.5))
            self.register_buffer("mask", torch.tensor([True, False, True]))
            self.register_buffer("count", torch.tensor(2**40))

    torch.manual_seed(0)
    plain = Odd()
    full = {name: t.detach().clone() for name, t in plain.state_dict().items()}
    plan = {"columns": WeightPlan(shard_dim=1), "experts": WeightPlan(shard_dim=0), "rows": WeightPlan(shard_dim=0)}
    model = gtp_shard(plain, cached_mesh((2, 2), names), policy=GTPPolicy(min_shard_numel=1), plan=plan)
    export_hf(model, folder, max_shard_size=100)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
    load_hf(model, folder)
    found = gather_full_dict(model.state_dict())
    assert found.keys() == full.keys()
    for name in full:
        assert torch.equal(found[name], full[name]) and found[name].dtype == full[name].dtype, name


@pytest.mark.parametrize("names", [("dp", "gtp_remat"), ("gtp_remat", "dp")])
def test_any_shape_and_dtype_survives_the_way_out_and_in(tmp_path, names):
    run_ranks(uneven, 4, str(tmp_path / "export"), names)


def loaded_tied(rank, world, folder):
    model = gtp_shard(CASES["tied_lm"].build(), cached_mesh((2,), ("gtp_remat",)), policy=GTPPolicy(min_shard_numel=1))
    load_hf(model, folder)
    assert model.head.weight is model.embed.weight
    assert_local({"head": model.head.weight}, {"head": torch.full((33, 12), 2.0)})


def test_of_a_tied_weight_saved_under_both_names_the_last_one_counts_as_in_load_state_dict(tmp_path):
    from safetensors.torch import save_file

    plain = CASES["tied_lm"].build()
    state = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    state["embed.weight"].fill_(1.0)
    state["head.weight"].fill_(2.0)
    plain.load_state_dict(state)
    assert (plain.embed.weight == 2.0).all()
    save_file(state, tmp_path / "model.safetensors")
    run_ranks(loaded_tied, 2, str(tmp_path))


def loaded_while_kept(rank, world, folder):
    model = gtp_shard(MLP(6, 10, 3), cached_mesh((2,), ("gtp_remat",)), policy=GTPPolicy(min_shard_numel=1))
    model.unshard()
    assert any(param.held is not None for param in model._gtp.root.params)
    load_hf(model, folder)
    assert all(param.held is None for param in model._gtp.root.params)
    plain = MLP(6, 10, 3)
    load_hf(plain, folder)
    assert torch.equal(model(torch.ones(2, 6)), plain(torch.ones(2, 6)))


def test_weights_kept_by_unshard_are_freed_and_not_used_after_a_load(tmp_path):
    export_hf(MLP(6, 10, 3), tmp_path / "export")
    run_ranks(loaded_while_kept, 2, str(tmp_path / "export"))


# ---- memory


@contextlib.contextmanager
def peak_memory(mapped=-1):
    """A list that gets the most bytes that were allocated inside, by torch and by Python, beyond what was before.

    A file that is mapped into memory, of `mapped` bytes, is reported as an allocation and is none.
    """
    found = []
    tracemalloc.start()
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            yield found
        live = peak = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]" and abs(event.nbytes()) != mapped:
                live += event.nbytes()
                peak = max(peak, live)
        found += [peak, tracemalloc.get_traced_memory()[1]]
    finally:
        tracemalloc.stop()


class Watched:
    """A file of safetensors that notes how many bytes each slice has that is asked for."""

    def __init__(self, file, asked):
        self.file, self.asked = file, asked

    def keys(self):
        return self.file.keys()

    def get_slice(self, name):
        return WatchedSlice(self.file.get_slice(name), self.asked)


class WatchedSlice:
    def __init__(self, source, asked):
        self.source, self.asked = source, asked
        self.get_shape = source.get_shape

    def __getitem__(self, slices):
        found = self.source[slices]
        self.asked.append(found.nbytes)
        return found


SMALL_THINGS = 200_000  # names, headers, the bookkeeping of what measures


def memory_of_load(rank, world, folder, block):
    from torch_gtp.checkpoint import _hf

    model = gtp_shard(MLP(256, 2048, 256), cached_mesh((4,), ("gtp_remat",)), policy=GTPPolicy(min_shard_numel=1))
    asked, before, open_file = [], _hf._BLOCK_BYTES, _hf.open_file
    load_hf(model, folder)  # imports come first
    with peak_memory(mapped=Path(folder, "model.safetensors").stat().st_size) as peak:
        load_hf(model, folder)

    @contextlib.contextmanager
    def watched(*args):
        with open_file(*args) as file:
            yield Watched(file, asked)

    _hf._BLOCK_BYTES, _hf.open_file = block, watched
    try:
        load_hf(model, folder)
    finally:
        _hf._BLOCK_BYTES, _hf.open_file = before, open_file
    sizes = [p.to_local().nbytes for p in model.parameters()]
    return max(sizes), sum(sizes), asked, sum(peak)


@pytest.mark.parametrize("block", [64 * 2**20, 65536])
def test_loading_reads_and_holds_no_more_than_this_ranks_slice_of_one_tensor(tmp_path, block):
    from safetensors.torch import save_file

    save_file(MLP(256, 2048, 256).state_dict(), tmp_path / "model.safetensors")
    full = 256 * 2048 * 4
    for local, stored, asked, peak in run_ranks(memory_of_load, 4, str(tmp_path), block):
        assert local == full // 4
        assert max(asked) <= min(local, block) and sum(asked) == stored
        assert peak <= local + SMALL_THINGS < full


def memory_of_export(rank, world, folder, name):
    model = gtp_shard(MLP(256, 2048, 256), cached_mesh((4,), ("gtp_remat",)), policy=GTPPolicy(min_shard_numel=1))
    with peak_memory() as peak:
        export_hf(model, Path(folder) / name)
    return sum(peak)


def test_exporting_holds_no_more_than_one_full_tensor(tmp_path):
    full = 256 * 2048 * 4
    peaks = run_ranks(memory_of_export, 4, str(tmp_path), "export")
    assert [path.name for path in (tmp_path / "export").iterdir()] == ["model.safetensors"]
    assert full <= peaks[0] <= full + full // 4 + SMALL_THINGS  # the tensor, and a slice that arrives
    assert max(peaks[1:]) <= SMALL_THINGS  # what they send is their shard itself


# ---- what goes wrong


@contextlib.contextmanager
def refused(model, match):
    before = {name: p.to_local().clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=match):
        yield
    for name, p in model.named_parameters():
        assert torch.equal(p.to_local(), before[name]), name


def refuse_folders(rank, world, base):
    mesh = cached_mesh((2,), ("gtp_remat",))
    model = gtp_shard(MLP(6, 10, 3), mesh, policy=GTPPolicy(min_shard_numel=1))
    base = Path(base)
    for name, match in {
        "nothing": "neither model.safetensors nor model.safetensors.index.json",
        "truncated": "model.safetensors cannot be read",
        "no shard": r"names \['model-00002-of-00002.safetensors'\], which are not there",
        "bad index": "model.safetensors.index.json is damaged",
        "fewer": r"the files lack \['2.bias'\] \(1 in all\) and have \[\]",
        "more": r"have \['extra'\] \(1 in all\), which the model lacks",
        "shape": r"2.weight has shape \(3, 9\) in the file and \(3, 10\) in the model",
    }.items():
        with refused(model, match):
            load_hf(model, base / name)
    with torch.device("meta"):
        on_meta = MLP(6, 10, 3)
    with pytest.raises(ValueError, match=r"0\.weight is on the meta device; call materialize_meta"):
        load_hf(gtp_shard(on_meta, mesh, policy=GTPPolicy(min_shard_numel=1)), base / "more")
    load_hf(model, base / "more", strict=False)
    assert_local(
        dict(model.named_parameters()), {n: torch.full_like(p, 2.0) for n, p in MLP(6, 10, 3).named_parameters()}
    )
    with refused(model, "exists and is not empty; choose a new folder"):
        export_hf(model, base / "more")
    with pytest.raises(TypeError, match="max_shard_size"):
        export_hf(model, base / "new", max_shard_size="5GB")
    with pytest.raises(ValueError, match="at least 1 byte, got 0"):
        export_hf(model, base / "new", max_shard_size=0)
    with pytest.raises(TypeError, match="expected a floating-point dtype"):
        export_hf(model, base / "new", dtype=torch.int8)
    assert not (base / "new").exists()


def test_folders_that_do_not_fit_are_refused_before_anything_is_changed(tmp_path):
    from safetensors.torch import save_file

    state = {name: torch.full_like(p, 2.0) for name, p in MLP(6, 10, 3).state_dict().items()}
    folders = {
        "fewer": {name: p for name, p in state.items() if name != "2.bias"},
        "more": {**state, "extra": torch.zeros(2)},
        "shape": {**state, "2.weight": torch.zeros(3, 9)},
        "truncated": state,
    }
    for name in ("nothing", "no shard", "bad index", *folders):
        (tmp_path / name).mkdir()
        if name in folders:
            save_file(folders[name], tmp_path / name / "model.safetensors")
    os.truncate(tmp_path / "truncated" / "model.safetensors", 300)
    index = {"weight_map": dict.fromkeys(state, "model-00002-of-00002.safetensors")}
    (tmp_path / "no shard" / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "bad index" / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    run_ranks(refuse_folders, 2, str(tmp_path))


@on_ranks(1)
def test_without_safetensors_the_error_says_what_to_install(rank, world):
    from torch_gtp.checkpoint import _safetensors

    find_spec = _safetensors.importlib.util.find_spec
    _safetensors.importlib.util.find_spec = lambda name: None if name == "safetensors" else find_spec(name)
    try:
        with pytest.raises(ImportError, match="pip install safetensors"):
            _safetensors.open_file(Path("model.safetensors"), "load_hf('x')")
    finally:
        _safetensors.importlib.util.find_spec = find_spec


def fails_to_write(rank, world, folder):
    from torch_gtp.checkpoint import _safetensors

    model = gtp_shard(MLP(6, 10, 3), cached_mesh((2,), ("gtp_remat",)), policy=GTPPolicy(min_shard_numel=1))
    if rank == 1:

        class Full(_safetensors.FileWriter):
            def append(self, tensor):
                self.error = self.error or OSError("No space left on device")

        from torch_gtp.checkpoint import _hf

        _hf.FileWriter = Full
    try:
        with pytest.raises(OSError if rank == 1 else ValueError, match="No space left on device"):
            export_hf(model, folder, max_shard_size=100)
    finally:
        if rank == 1:
            _hf.FileWriter = _safetensors.FileWriter
    assert not Path(folder).exists()
    dist.barrier()


def test_a_disk_that_is_full_on_one_rank_is_an_error_on_all(tmp_path):
    run_ranks(fails_to_write, 2, str(tmp_path / "export"))


# ---- from the meta device


def from_meta(rank, world, folder):
    from tests.dist.test_transformers import build_on_meta

    mesh = cached_mesh(*ALL_MESHES["tp2-gtp2"])
    model = gtp_shard(parallelize(build_on_meta("qwen3_tied"), mesh), mesh, policy=GTPPolicy(min_shard_numel=1))
    materialize_meta(model, seed=1, init=model._init_weights)
    load_hf(model, folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_local(dict(model.named_parameters()), dict(build("qwen3_tied").named_parameters()))


def test_a_model_built_on_the_meta_device_takes_weights_after_materialize_meta(tmp_path):
    build("qwen3_tied").save_pretrained(tmp_path)
    run_ranks(from_meta, 4, str(tmp_path))
