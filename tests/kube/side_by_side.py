"""Acts that have nothing to do with each other go on at once, and each is told as a test of its own."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

Act = Callable[..., None]


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Acts under way, each in a thread."""

    play: Callable[[Act], None]
    under_way: dict[Act, Future[None]]

    def end(self, act: Act) -> None:
        """Until the act is over; raises what it raised. One that is asked for again begins again."""
        future = self.under_way.pop(act, None)
        if future is None:
            self.play(act)
        else:
            future.result()


@contextmanager
def side_by_side(acts: Iterable[Act], play: Callable[[Act], None], at_once: int) -> Iterator[SideBySide]:
    """``play`` each of the acts, ``at_once`` at the same time."""
    with ThreadPoolExecutor(at_once, "act") as pool:
        try:
            yield SideBySide(play, {act: pool.submit(play, act) for act in acts})
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def chosen(request: pytest.FixtureRequest) -> list[Act]:
    """The acts of the module's tests that were selected, in their order."""
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    return [call.params["act"] for call in calls if call is not None and "act" in call.params]
