"""Random modules: a tree of plain tuples, which can be sent to ranks, the module it stands for, a strategy.

("linear", out, bias)           ("norm",)            ("conv",)
("seq", tree, ...)              ("residual", tree)   ("twice", tree)        one module, called two times
("frozen", tree)                ("checkpoint", tree, use_reentrant)
("switch", tree, tree)          takes the one or the other, depending on the batch
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models import Case, RMSNorm, square_loss

Tree = tuple[Any, ...]

_WIDTH = 6  # features of the input, and of what `residual` and `twice` add


class Residual(nn.Module):
    def __init__(self, inner: nn.Module, inner_out: int, dim: int):
        super().__init__()
        self.inner, self.back = inner, nn.Linear(inner_out, dim)

    def forward(self, x: Tensor, odd: bool) -> Tensor:
        return x + self.back(F.silu(self.inner(x, odd)))


class Twice(nn.Module):
    def __init__(self, inner: nn.Module, inner_out: int, dim: int):
        super().__init__()
        self.inner, self.back = inner, nn.Linear(inner_out, dim, bias=False)

    def forward(self, x: Tensor, odd: bool) -> Tensor:
        return self.back(self.inner(self.back(self.inner(x, odd)), odd))


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, use_reentrant: bool):
        super().__init__()
        self.inner, self.use_reentrant = inner, use_reentrant

    def forward(self, x: Tensor, odd: bool) -> Tensor:
        return checkpoint(self.inner, x, odd, use_reentrant=self.use_reentrant)


class Switch(nn.Module):
    def __init__(self, even: nn.Module, odd: nn.Module):
        super().__init__()
        self.even, self.odd = even, odd

    def forward(self, x: Tensor, odd: bool) -> Tensor:
        return (self.odd if odd else self.even)(x, odd)


class Sequence(nn.Module):
    def __init__(self, parts: list[nn.Module]):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor, odd: bool) -> Tensor:
        for module in self.parts:
            x = module(x, odd)
        return x


class Leaf(nn.Module):
    """A module of one input among modules that take the batch's parity as well."""

    def __init__(self, inner: nn.Module, activation: Callable[[Tensor], Tensor] | None = None):
        super().__init__()
        self.inner, self.activation = inner, activation

    def forward(self, x: Tensor, odd: bool) -> Tensor:
        x = self.inner(x)
        return x if self.activation is None else self.activation(x)


class Conv(nn.Module):
    """A convolution over the features."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.unsqueeze(1)).mean(1)


def build_tree(tree: Tree, dim: int) -> tuple[nn.Module, int]:
    """The module of a tree for `dim` input features, and its number of output features."""
    kind, *rest = tree
    if kind == "linear":
        out, bias = rest
        return Leaf(nn.Linear(dim, out, bias=bias), F.silu), out
    if kind == "norm":
        return Leaf(RMSNorm(dim)), dim
    if kind == "conv":
        return Leaf(Conv()), dim
    if kind == "seq":
        modules = []
        for child in rest:
            module, dim = build_tree(child, dim)
            modules.append(module)
        return Sequence(modules), dim
    if kind == "switch":
        (even, even_out), (odd, odd_out) = (build_tree(child, dim) for child in rest)
        ends = [Leaf(nn.Linear(out, dim)) for out in (even_out, odd_out)]
        return Switch(Sequence([even, ends[0]]), Sequence([odd, ends[1]])), dim
    inner, out = build_tree(rest[0], dim)
    if kind == "residual":
        return Residual(inner, out, dim), dim
    if kind == "twice":
        return Twice(inner, out, dim), dim
    if kind == "frozen":
        return inner.requires_grad_(False), out
    if kind == "checkpoint":
        return Checkpointed(inner, rest[1]), out
    raise ValueError(tree)


def _root(tree: Tree) -> nn.Module:
    inner, out = build_tree(tree, _WIDTH)
    return Sequence([Leaf(nn.Linear(_WIDTH, _WIDTH)), inner, Leaf(nn.Linear(out, 3))])


def _inputs(generator: torch.Generator, seed: int) -> tuple[Any, ...]:
    return torch.randn(3, _WIDTH, generator=generator), seed % 2 == 1


def tree_case(tree: Tree) -> Case:
    return Case(lambda: _root(tree), _inputs, square_loss)


def trees() -> st.SearchStrategy[Tree]:
    """Trees of up to about ten weights; sizes are mostly uneven, some smaller than the number of shards."""
    leaves = st.one_of(
        st.tuples(st.just("linear"), st.sampled_from([2, 3, 5, 6, 8, 12]), st.booleans()),
        st.just(("norm",)),
        st.just(("conv",)),
    )

    def extend(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
        return st.one_of(
            st.lists(inner, min_size=1, max_size=3).map(lambda children: ("seq", *children)),
            st.tuples(st.sampled_from(["residual", "twice", "frozen"]), inner),
            st.tuples(st.just("checkpoint"), inner, st.booleans()),
            st.tuples(st.just("switch"), inner, inner),
        )

    return st.recursive(leaves, extend, max_leaves=6)
