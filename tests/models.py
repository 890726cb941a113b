"""Small models that the tests share, each with its data, its loss and, where it has one, its tensor-parallel
plan.

`CASES` is the table: `CASES["mlp"].build()` is always the same model, `CASES["mlp"].batch(seed)` always the
same data.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

VOCAB = 33
LoraTarget = nn.Linear


# ---- models


class MLP(nn.Sequential):
    """Biases and sizes that split unevenly: with the default, weights of 10x6, 9x10 and 3x9."""

    def __init__(self, *sizes: int, bias: bool = True):
        sizes = sizes or (6, 10, 9, 3)
        layers: list[nn.Module] = []
        for fan_in, fan_out in itertools.pairwise(sizes):
            layers += [nn.Linear(fan_in, fan_out, bias=bias), nn.GELU()]
        super().__init__(*layers[:-1])


class RMSNorm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    """Split q, k, v. Heads are counted from the projections, so a tensor-parallel slice of them works too."""

    def __init__(self, dim: int, head_dim: int):
        super().__init__()
        self.head_dim = head_dim
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, dim: int = 16, head_dim: int = 4, hidden: int = 36):
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(dim), Attention(dim, head_dim)
        self.mlp_norm, self.mlp = RMSNorm(dim), SwiGLU(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class AttentionLM(nn.Module):
    def __init__(self, layers: int = 2, dim: int = 16, vocab: int = VOCAB):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class TiedLM(nn.Module):
    def __init__(self, dim: int = 12, vocab: int = VOCAB):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mlp = MLP(dim, 20, dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + self.mlp(x))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 10, 3, padding=1)
        self.second = nn.Conv2d(10, 6, 3, padding=1, bias=False)
        self.line = nn.Conv1d(6, 5, 3)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.second(F.gelu(self.first(x))))
        return self.head(self.line(x.flatten(2)).mean(-1))


class MHABlock(nn.Module):
    """`nn.MultiheadAttention` reads `out_proj.weight` itself: the forward of its child never runs."""

    def __init__(self, dim: int = 12):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.mlp = MLP(dim, 21, dim)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(x)


class ReadsChild(nn.Module):
    """Reads the weight of a child whose forward never runs, transposed and twice."""

    def __init__(self, dim: int = 10, hidden: int = 14):
        super().__init__()
        self.inner = nn.Linear(dim, hidden)
        self.outer = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(F.linear(x, self.inner.weight, self.inner.bias))
        return self.outer(h @ self.inner.weight)


class WithScalar(nn.Module):
    """A parameter without dimensions beside weights."""

    def __init__(self, dim: int = 10):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.mlp = MLP(dim, 14, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) * self.scale


class LoraLinear(nn.Module):
    """A frozen linear layer and a trained low-rank correction."""

    def __init__(self, base: LoraTarget, rank: int = 3):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def with_lora(model: nn.Module, rank: int = 3) -> nn.Module:
    """Put an adapter around every `nn.Linear` of `model`, in place."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, LoraLinear(child, rank))
    return model


class GANPair(nn.Module):
    """A generator, a discriminator, and a gradient penalty: a double backward through the discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = MLP(4, 14, 10)
        self.discriminator = MLP(10, 14, 1)

    def forward(self, noise: Tensor, real: Tensor) -> Tensor:
        fake = self.generator(noise)
        blend = (0.3 * real + 0.7 * fake.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(self.discriminator(blend).sum(), blend, create_graph=True)
        penalty = (slope.norm(dim=-1) - 1).pow(2).mean()
        return self.discriminator(fake).mean() - self.discriminator(real).mean() + penalty


class Conditional(nn.Module):
    """Takes one of two branches, so a prediction of what comes next is wrong whenever the choice changes."""

    def __init__(self, dim: int = 10):
        super().__init__()
        self.stem, self.head = nn.Linear(dim, dim), nn.Linear(dim, 3)
        self.left, self.right = MLP(dim, 14, dim), MLP(dim, 11, 18, dim)

    def forward(self, x: Tensor, go_left: bool) -> Tensor:
        x = F.gelu(self.stem(x))
        return self.head(self.left(x) if go_left else self.right(x))


class SharedBlock(nn.Module):
    """One block used twice in a forward, with another layer between."""

    def __init__(self, dim: int = 10):
        super().__init__()
        self.block, self.between = MLP(dim, 14, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(F.gelu(self.between(self.block(x))))


def hf_llama(**overrides: Any) -> nn.Module:
    """A tiny Hugging Face Llama: grouped-query attention, sizes that split unevenly over 4."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**_HF_SIZES, **overrides}))


def hf_qwen3(**overrides: Any) -> nn.Module:
    """A tiny Hugging Face Qwen3: norms on q and k, tied embeddings."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**{**_HF_SIZES, "head_dim": 8, "tie_word_embeddings": True, **overrides}))


_HF_SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 42,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": None,
        "attn_implementation": "sdpa",
    }
)


# ---- data and losses


def _features(*shape: int) -> Callable[[torch.Generator, int], tuple[Any, ...]]:
    return lambda generator, _: (torch.randn(*shape, generator=generator),)


def _tokens(generator: torch.Generator, _: int) -> tuple[Any, ...]:
    return (torch.randint(0, VOCAB, (2, 8), generator=generator),)


def _gan_inputs(generator: torch.Generator, _: int) -> tuple[Any, ...]:
    return torch.randn(3, 4, generator=generator), torch.randn(3, 10, generator=generator)


def square_loss(model: nn.Module, batch: tuple[Any, ...]) -> Tensor:
    return model(*batch).pow(2).mean()


def next_token_loss(model: nn.Module, batch: tuple[Any, ...]) -> Tensor:
    (ids,) = batch
    out = model(ids)
    logits = out if isinstance(out, Tensor) else out.logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def own_loss(model: nn.Module, batch: tuple[Any, ...]) -> Tensor:
    return model(*batch)


# ---- the table


@dataclass(frozen=True)
class Case:
    """A model with what is needed to train it."""

    make: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator, int], tuple[Any, ...]]
    loss: Callable[[nn.Module, Any], Tensor]
    tp_plan: Mapping[str, Callable[[], ParallelStyle]] = field(default_factory=dict)

    def build(self, seed: int = 0) -> nn.Module:
        """The model of this seed, whatever random numbers were drawn before or will be drawn after."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make()

    def batch(self, seed: int) -> tuple[Any, ...]:
        return self.inputs(torch.Generator().manual_seed(seed), seed)

    def plan(self, prefix: str = "") -> dict[str, ParallelStyle]:
        """The plan for `parallelize_module`, with fresh styles."""
        return {prefix + name: style() for name, style in self.tp_plan.items()}


_MLP_PLAN = MappingProxyType({"0": ColwiseParallel, "2": RowwiseParallel})
_LM_PLAN = MappingProxyType(
    {f"layers.*.attention.{name}": ColwiseParallel for name in "qkv"}
    | {"layers.*.attention.o": RowwiseParallel, "layers.*.mlp.down": RowwiseParallel}
    | {f"layers.*.mlp.{name}": ColwiseParallel for name in ("gate", "up")}
)

CASES: Mapping[str, Case] = MappingProxyType(
    {
        "mlp": Case(MLP, _features(4, 6), square_loss, _MLP_PLAN),
        "mlp_even": Case(lambda: MLP(8, 16, 8), _features(4, 8), square_loss, _MLP_PLAN),
        "attention_lm": Case(AttentionLM, _tokens, next_token_loss, _LM_PLAN),
        "tied_lm": Case(TiedLM, _tokens, next_token_loss, {f"mlp.{k}": v for k, v in _MLP_PLAN.items()}),
        "conv": Case(ConvNet, _features(2, 3, 6, 5), square_loss),
        "mha": Case(MHABlock, _features(2, 5, 12), square_loss),
        "reads_child": Case(ReadsChild, _features(4, 10), square_loss),
        "scalar": Case(WithScalar, _features(4, 10), square_loss),
        "lora": Case(lambda: with_lora(MLP(10, 14, 9)), _features(4, 10), square_loss),
        "gan": Case(GANPair, _gan_inputs, own_loss),
        "conditional": Case(
            Conditional,
            lambda generator, seed: (torch.randn(4, 10, generator=generator), seed % 2 == 0),
            square_loss,
        ),
        "shared_block": Case(SharedBlock, _features(4, 10), square_loss),
        "hf_llama": Case(hf_llama, _tokens, next_token_loss),
        "hf_qwen3": Case(hf_qwen3, _tokens, next_token_loss),
    }
)
