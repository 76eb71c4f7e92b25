"""Which error is told, and whether models count as whole, where something fails while the engine has their memory."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hybridflow.flows import synchronous
from hybridflow.flows.synchronous import SharedEngine


class Engine:
    """fails: while the trainer takes its memory back."""

    def __init__(self, fails: bool) -> None:
        self._fails = fails

    @contextlib.contextmanager
    def resharded(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self._fails:
                raise RuntimeError("on the way back")

    awake = contextlib.nullcontext


@pytest.mark.parametrize(
    ("within", "back", "told", "in_place"),
    [
        (False, False, None, True),
        (True, False, "within", True),
        (False, True, "on the way back", False),
        (True, True, "within", False),
    ],
)
def test_the_first_error_is_told(
    within: bool, back: bool, told: str | None, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing: Any = contextlib.nullcontext
    monkeypatch.setattr(synchronous, "training_memory_offloaded", lambda *roles: nothing())
    monkeypatch.setattr(
        synchronous, "dist", SimpleNamespace(barrier=lambda group: None, group=SimpleNamespace(WORLD=0))
    )
    platform: Any = SimpleNamespace(empty_caches=lambda: None)
    made = SharedEngine(Engine(back), None, platform)  # type: ignore[arg-type]
    try:
        with made.awake():
            assert not made.models_in_place
            if within:
                raise ValueError("within")
    except (ValueError, RuntimeError) as error:
        assert str(error) == told
    else:
        assert told is None
    assert made.models_in_place == in_place
