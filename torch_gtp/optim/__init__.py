"""Optimizers that know how parameters are sharded."""

from ._muon import Muon

__all__ = ["Muon"]
