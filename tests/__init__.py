"""Tests of torch_gtp: `harness.py` runs ranks, `comm_double.py` plays NCCL, `reference.py` is an oracle."""
