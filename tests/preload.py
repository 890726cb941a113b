"""Imported once by the fork server: every rank starts with torch, the library and the test tools already loaded.

Nothing here may run an operator or a backward: threads of a thread pool do not survive a fork.
"""

import contextlib
import importlib

_MODULES = (
    "torch.distributed.tensor.parallel",
    "torch._dynamo",  # what every optimizer imports at its first step
    "hypothesis",
    "_pytest.assertion.rewrite",
    "tests.rank_worker",
)

for name in _MODULES:
    importlib.import_module(name)
with contextlib.suppress(Exception):  # a broken library must fail the test that imports it, not the server
    importlib.import_module("torch_gtp")
