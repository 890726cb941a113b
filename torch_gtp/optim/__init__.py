"""Optimizers that know how parameters are sharded."""

from ._muon import Muon
from ._shard_states import shard_optimizer_states

__all__ = ["Muon", "shard_optimizer_states"]
