"""Imported once by the fork server: every rank starts with torch and the library already loaded.

Nothing here may run an operator or a backward: threads of a thread pool do not survive a fork.
"""

import contextlib
import importlib

for name in ("torch.distributed.tensor.parallel", "torch._dynamo"):  # every optimizer imports the latter
    importlib.import_module(name)
with contextlib.suppress(Exception):  # a broken library must fail the test that imports it, not the server
    importlib.import_module("torch_gtp")
