"""Checkpoints that any topology reads, and weights of Hugging Face models, slice by slice."""

from ._dcp import load, save
from ._hf import export_hf, load_hf

__all__ = ["export_hf", "load", "load_hf", "save"]
