"""``explain(model)``: what is sharded, how, and what its gathers hide behind."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ._access import state_of
from ._chain import Direction
from ._first_call import block_bytes
from ._state import ParamState, RootState


@dataclass(frozen=True)
class WeightReport:
    """One parameter: its shapes in elements, its bytes on this rank, its places in the recorded chains."""

    fqn: str
    shape: tuple[int, ...]
    placements: str
    sharded: bool
    shard_bytes: int
    full_bytes: int
    forward: str
    backward: str
    hidden_behind: str


@dataclass(frozen=True)
class Report:
    """The answer of ``explain``; ``str()`` is a table."""

    weights: tuple[WeightReport, ...]
    axes: dict[str, int]
    bytes_plain: int
    bytes_sharded: int
    lookahead_bytes: int
    fsdp2_gathered_bytes: int
    policy: str

    @property
    def sharded_count(self) -> int:
        """How many parameters are split over ``gtp_remat``."""
        return sum(weight.sharded for weight in self.weights)

    @property
    def gathered_bytes(self) -> int:
        """Most bytes of full weights alive at once: one in use and the lookahead."""
        largest = max((weight.full_bytes for weight in self.weights if weight.sharded), default=0)
        return largest + max(self.lookahead_bytes, largest)

    def __str__(self) -> str:
        head = ("parameter", "shape", "placements", "shard B", "full B", "fwd", "bwd", "gather hidden behind")
        rows = [
            (
                weight.fqn,
                "x".join(map(str, weight.shape)),
                weight.placements,
                str(weight.shard_bytes),
                str(weight.full_bytes),
                weight.forward,
                weight.backward,
                weight.hidden_behind,
            )
            for weight in self.weights
        ]
        widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (head, *rows)
        ]
        axes = ", ".join(f"{name}={size}" for name, size in self.axes.items())
        lines += [
            f"{self.sharded_count} of {len(self.weights)} parameters sharded; axes: {axes}",
            f"parameter bytes per rank: {self.bytes_sharded} (whole: {self.bytes_plain})",
            f"gathered at most: {self.gathered_bytes} B, of it {self.lookahead_bytes} B ahead",
            f"gathered by FSDP2 per block (two blocks): {self.fsdp2_gathered_bytes} B",
            f"policy: {self.policy}",
        ]
        return "\n".join(lines)


def explain(model: nn.Module) -> Report:
    """Describe a model under ``gtp_shard``: per parameter its logical shape, placements, bytes of its shard, places in
    the recorded forward and backward chains and what its forward gather runs beside; totals against the whole model and
    against FSDP2 per block.

    Chains fill in with use: before the first forward their columns show ``-``. No communication.

    Raises:
        ValueError: the model is not under ``gtp_shard``.

    Example::

        print(torch_gtp.debug.explain(model))
    """
    state = state_of(model)
    if state is None:
        raise ValueError(
            f"explain({type(model).__name__}): not under gtp_shard; call it on the module that was sharded"
        )
    root = state.root
    forward = _places(root, Direction.FORWARD)
    backward = _places(root, Direction.BACKWARD)
    weights = tuple(_report(root, param, forward, backward) for param in root.params)
    mesh = state.mesh
    axes = {} if mesh is None else {name: mesh.size(i) for i, name in enumerate(mesh.mesh_dim_names or ())}
    return Report(
        weights=weights,
        axes=axes,
        bytes_plain=sum(param.layout.shape.numel() * param.param.dtype.itemsize for param in root.params),
        bytes_sharded=sum(weight.shard_bytes for weight in weights),
        lookahead_bytes=root.lookahead,
        fsdp2_gathered_bytes=2 * block_bytes(root, root.module()),
        policy=str(root.policy),
    )


def _places(root: RootState, direction: Direction) -> dict[int, list[tuple[list[int], int]]]:
    places: dict[int, list[tuple[list[int], int]]] = {}
    for order in root.chains.orders(direction):
        for position, index in enumerate(order):
            places.setdefault(index, []).append((order, position))
    return places


def _report(
    root: RootState,
    param: ParamState,
    forward: dict[int, list[tuple[list[int], int]]],
    backward: dict[int, list[tuple[list[int], int]]],
) -> WeightReport:
    uses = forward.get(param.index, [])
    behind = "-"
    if uses:
        order, position = uses[0]
        behind = root.params[order[position - 1]].fqn if position and root.policy.prefetch else "nothing (first)"
    return WeightReport(
        fqn=param.fqn,
        shape=tuple(param.layout.shape),
        placements="[" + ", ".join(map(_short, param.layout.spec.placements)) + "]",
        sharded=param.is_sharded,
        shard_bytes=param.layout.shard_shape.numel() * param.param.dtype.itemsize,
        full_bytes=param.full_bytes,
        forward=_positions(uses),
        backward=_positions(backward.get(param.index, [])),
        hidden_behind=behind if param.is_sharded else "no gather",
    )


def _positions(uses: list[tuple[list[int], int]]) -> str:
    return ",".join(str(position) for _, position in uses) or "-"


def _short(placement: object) -> str:
    return str(placement)
