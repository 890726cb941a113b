"""How tests state that a mistake is refused: where it is, what was found, what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def refuses(error: type[Exception], *fragments: str) -> Iterator[None]:
    """The block raises exactly `error`, with every fragment in its message."""
    with pytest.raises(error) as caught:
        yield
    message = str(caught.value)
    assert type(caught.value) is error, f"{type(caught.value).__name__}: {message}"
    missing = [fragment for fragment in fragments if fragment not in message]
    assert not missing, f"{missing} missing in: {message}"
