"""Modules that treat their parameters in ways of their own: lists beside attributes, fast paths, parametrizations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from tests.dist.twin import (
    REORDERED,
    assert_grads,
    assert_local,
    check_twin,
    gather_mesh,
    on_ranks,
    plain_grads,
    randn,
    seeded,
    shard,
)
from tests.harness import current_double
from tests.models import MLP, with_lora
from torch_gtp import GTPPolicy, WeightPlan, gtp_shard


def outputs_and_run(make_inputs):
    """A run that drives the module on data of each coordinate, whatever it returns."""

    def run(model, coordinate):
        out = model(*make_inputs(coordinate))
        tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        sum(tensor.square().mean() for tensor in tensors).backward()

    return run


# ---- recurrent

RNNS = {
    "lstm": lambda: nn.LSTM(6, 5, num_layers=2, batch_first=True),
    "bidirectional_lstm": lambda: nn.LSTM(6, 5, bidirectional=True),
    "projected_lstm": lambda: nn.LSTM(6, 7, proj_size=3),
    "gru": lambda: nn.GRU(6, 5),
    "rnn": lambda: nn.RNN(6, 5, bias=False),
    "cell": lambda: Recurrence(),
}


class Recurrence(nn.Module):
    """A cell that is called once per position: its weights are used again and again in one forward."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(6, 5)

    def forward(self, x):
        h = x.new_zeros(x.shape[1], 5)
        for step in x:
            h = self.cell(step, h)
        return h


@pytest.mark.parametrize("kind", RNNS)
@on_ranks(2)
def test_recurrent_modules_train_as_plain_ones(rank, world, kind):
    run = outputs_and_run(lambda coordinate: (randn(3, 4, 6, seed=coordinate),))
    # A cell adds the gradients of its three uses after each was averaged over ranks
    check_twin(rank, world, seeded(RNNS[kind]), run, rtol=REORDERED if kind == "cell" else 0.0)


@on_ranks(2)
def test_the_weight_list_of_a_recurrent_module_follows_its_attributes(rank, world):
    model = shard(seeded(RNNS["lstm"])())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in RNNS["lstm"]().named_parameters()]
    assert all(kept is stored for kept, stored in zip(model._flat_weights, model.parameters(), strict=True))
    model.flatten_parameters()  # a no-op, as on any CPU module
    model.load_state_dict(model.state_dict())
    model(randn(3, 4, 6))


@on_ranks(2)
def test_a_recurrent_module_runs_without_gradients_and_on_packed_sequences(rank, world):
    plain, model = seeded(RNNS["lstm"])(), shard(seeded(RNNS["lstm"])())
    packed = nn.utils.rnn.pack_padded_sequence(
        randn(3, 4, 6), torch.tensor([4, 3, 1]), batch_first=True, enforce_sorted=True
    )
    for inputs in (randn(3, 4, 6), packed):
        with torch.no_grad():
            ours, theirs = model(inputs), plain(inputs)
        for left, right in zip(*map(torch.utils._pytree.tree_leaves, (ours, theirs)), strict=True):
            assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


# ---- attention

ATTENTION = {
    "packed": lambda: nn.MultiheadAttention(12, 3, batch_first=True),
    "separate": lambda: nn.MultiheadAttention(12, 3, kdim=12, vdim=8, batch_first=True),
    "bias_kv": lambda: nn.MultiheadAttention(12, 3, add_bias_kv=True, batch_first=True),
}


class SelfAttention(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.attention = make()

    def forward(self, x):
        value = x[..., : self.attention.vdim]
        return self.attention(x, x, value, need_weights=False)[0]


@pytest.mark.parametrize("kind", ATTENTION)
@on_ranks(2)
def test_multihead_attention_trains_as_a_plain_one(rank, world, kind):
    build = seeded(lambda: SelfAttention(ATTENTION[kind]))
    model = check_twin(rank, world, build, outputs_and_run(lambda coordinate: (randn(2, 5, 12, seed=coordinate),)))
    names = {param.fqn for param in model._gtp.root.sharded()}
    assert "attention.out_proj.weight" in names


def encoder_layer(norm_first=False):
    return nn.TransformerEncoderLayer(12, 3, dim_feedforward=18, dropout=0.0, batch_first=True, norm_first=norm_first)


def encoder():
    return nn.TransformerEncoder(encoder_layer(), num_layers=2)


@pytest.mark.parametrize("norm_first", [False, True])
@on_ranks(2)
def test_an_encoder_layer_trains_as_a_plain_one(rank, world, norm_first):
    run = outputs_and_run(lambda coordinate: (randn(2, 5, 12, seed=coordinate),))
    check_twin(rank, world, seeded(lambda: encoder_layer(norm_first)), run)


@pytest.mark.parametrize("kind", ["layer", "encoder"])
@on_ranks(2)
def test_the_fast_path_of_an_encoder_in_eval_mode_gives_the_plain_outputs(rank, world, kind):
    build = seeded({"layer": encoder_layer, "encoder": encoder}[kind])
    plain, model = build().eval(), shard(build().eval())
    x = randn(2, 5, 12)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    for with_mask in (False, True):
        for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            mask = {"src_key_padding_mask": padding} if with_mask else {}
            with context():
                ours, theirs = model(x, **mask), plain(x, **mask)
            seen = ours.shape[1]  # the fast path may cut off what is padding everywhere
            # One fused kernel, or several: the plain module's own choice differs by 2e-7
            torch.testing.assert_close(ours.detach(), theirs[:, :seen].detach(), rtol=0, atol=1e-6)
    assert current_double().problems() == []
    model.train()
    run = outputs_and_run(lambda coordinate: (randn(2, 5, 12, seed=coordinate),))
    run(model, rank)
    assert_grads(model, plain_grads(build, run, world))


@on_ranks(2)
def test_a_whole_transformer_trains_as_a_plain_one(rank, world):
    build = seeded(lambda: nn.Transformer(12, 3, 1, 1, 18, dropout=0.0, batch_first=True))
    run = outputs_and_run(lambda coordinate: (randn(2, 5, 12, seed=coordinate), randn(2, 4, 12, seed=9)))
    check_twin(rank, world, build, run)


# ---- convolutions and others

CONVOLUTIONS = {
    "conv1d": (lambda: nn.Conv1d(3, 5, 3), (2, 3, 9)),
    "conv2d_grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding="same"), (2, 4, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 5, 2), (1, 2, 4, 4, 4)),
    "transposed": (lambda: nn.ConvTranspose2d(5, 3, 3), (2, 5, 4, 4)),
    "circular": (lambda: nn.Conv1d(3, 5, 3, padding=1, padding_mode="circular"), (2, 3, 9)),
    "bilinear": (lambda: Square(), (3, 6)),
}


class Square(nn.Module):
    def __init__(self):
        super().__init__()
        self.bilinear = nn.Bilinear(6, 6, 5)

    def forward(self, x):
        return self.bilinear(x, x)


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@on_ranks(2)
def test_weights_of_three_and_more_dims_train_as_plain_ones(rank, world, kind):
    make, shape = CONVOLUTIONS[kind]
    run = outputs_and_run(lambda coordinate: (randn(*shape, seed=coordinate),))
    check_twin(rank, world, seeded(make), run)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@on_ranks(2)
def test_an_embedding_bag_trains_as_a_plain_one(rank, world, mode):
    build = seeded(lambda: nn.Sequential(nn.EmbeddingBag(11, 6, mode=mode), nn.Linear(6, 5)))
    check_twin(
        rank, world, build, outputs_and_run(lambda coordinate: (torch.arange(12).view(3, 4) % (7 + coordinate),))
    )


# ---- parametrized before sharding


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)


def parametrized(how):
    def build():
        model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 5))
        how(model)
        return model

    return seeded(build)


PARAMETRIZATIONS = {
    "custom": lambda model: parametrize.register_parametrization(model[0], "weight", Symmetric()),
    "weight_norm": lambda model: parametrizations.weight_norm(model[2]),
    "spectral_norm": lambda model: parametrizations.spectral_norm(model[2]),
    "orthogonal": lambda model: parametrizations.orthogonal(model[0]),
    "both": lambda model: [parametrizations.weight_norm(model[i]) for i in (0, 2)],
}


@pytest.mark.parametrize("kind", PARAMETRIZATIONS)
@on_ranks(2)
def test_parametrizations_from_before_sharding_work_on_the_whole_weight(rank, world, kind):
    run = outputs_and_run(lambda coordinate: (randn(3, 6, seed=coordinate),))
    build = parametrized(PARAMETRIZATIONS[kind])
    # A spectral norm goes on with its power iteration in every forward: only the first one equals the first one
    repeats = 1 if kind == "spectral_norm" else 3
    model = check_twin(rank, world, build, run, rtol=REORDERED, repeats=repeats)
    assert any("parametrizations" in param.fqn for param in model._gtp.root.sharded())
    assert list(model.state_dict()) == list(build().state_dict())


@on_ranks(2)
def test_a_cached_parametrization_is_computed_once_per_forward(rank, world):
    run = outputs_and_run(lambda coordinate: (randn(3, 6, seed=coordinate),))

    def cached(model, coordinate):
        with parametrize.cached():
            run(model, coordinate)

    check_twin(rank, world, parametrized(PARAMETRIZATIONS["custom"]), cached, rtol=REORDERED)


# ---- adapters


def adapted_run(model, coordinate):
    model(randn(3, 10, seed=coordinate)).square().mean().backward()


def trainable(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    "order",
    ["adapt then shard", "shard parts then adapt then shard", "shard then adapt then shard again", "shard then adapt"],
)
@on_ranks(2)
def test_adapters_train_beside_frozen_sharded_weights(rank, world, order):
    """Before and after: adapters that come later are plain until their parent is sharded again."""
    base = seeded(lambda: MLP(10, 14, 9))

    def adapted():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            return with_lora(base())

    expected = plain_grads(adapted, adapted_run, world)
    if order == "adapt then shard":
        model = shard(adapted())
    else:
        model = base()
        for part in (model,) if order == "shard then adapt then shard again" else (model[0], model[2]):
            shard(part)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            with_lora(model)
        if order != "shard then adapt":
            shard(model)
    for _ in range(2):
        adapted_run(model, rank)
        found = {name: p.grad for name, p in trainable(model).items()}
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        if order == "shard then adapt":  # the adapters are plain, and this rank's own data is all they saw
            theirs = adapted()
            adapted_run(theirs, rank)
            for name, grad in found.items():
                assert torch.equal(grad, dict(theirs.named_parameters())[name].grad), name
        else:
            assert_local(found, {name: expected[name] for name in found}, what="gradients of adapters")
        model.zero_grad()


@on_ranks(2)
def test_frozen_weights_are_gathered_and_never_reduced(rank, world):
    model = shard(seeded(lambda: with_lora(MLP(10, 14, 9)))())
    for _ in range(2):
        with current_double().section() as calls:
            adapted_run(model, rank)
    root = model._gtp.root
    trained = [param for param in root.sharded() if param.param.requires_grad]
    assert len(trained) == 4
    assert sum(call.op == "reduce_scatter" for call in calls) == 4
    frozen = [param for param in root.sharded() if not param.param.requires_grad]
    gathered = [call.shape for call in calls if call.op == "all_gather"]
    for param in frozen:
        assert tuple(param.layout.gathered_shape) in gathered


# ---- weights that nobody calls a module for


class Stacked(nn.Module):
    """Experts as one 3-D weight, and a position table that is added, not called."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 6) * 0.1)
        self.experts = nn.Parameter(torch.randn(3, 7, 6) * 0.1)

    def forward(self, x):
        return torch.einsum("bsi,eoi->bseo", x + self.table, self.experts)


@pytest.mark.parametrize("dim", [0, 1, 2])
@on_ranks(2)
def test_bare_parameters_are_split_along_any_dim(rank, world, dim):
    run = outputs_and_run(lambda coordinate: (randn(2, 5, 6, seed=coordinate),))
    build = seeded(Stacked)
    model = gtp_shard(
        build(),
        gather_mesh(),
        policy=GTPPolicy(min_shard_numel=1),
        plan={"experts": WeightPlan(shard_dim=dim), "table": WeightPlan(shard_dim=min(dim, 1))},
    )
    expected = plain_grads(build, run, world)
    for _ in range(2):
        run(model, rank)
        assert_grads(model, expected)
        model.zero_grad()


class TwoHeads(nn.Module):
    """Entry points other than `forward`: a user calls them through the module, as in plain PyTorch."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 5)

    def features(self, x):
        return F.gelu(self.body(x))

    def forward(self, x):
        return self.head(self.features(x))


@on_ranks(2)
def test_methods_other_than_forward_materialize_what_they_call(rank, world):
    build = seeded(TwoHeads)

    def run(model, coordinate):
        model.head(model.features(randn(3, 6, seed=coordinate))).square().mean().backward()

    check_twin(rank, world, build, run)
