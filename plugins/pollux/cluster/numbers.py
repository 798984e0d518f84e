"""Decision numbers: which of those that are found count, and which one comes next; pure.

The counter (in the Lease, or in its file) is believed: each number was written there before anybody had it.
Anyone may write anything on a job, and a Lease may get lost, be set back or be edited by hand. So a number on
a job that is ahead of the counter counts, lest one be used twice on which a driver has acted, but only as far
ahead as a counter can have been; what is beyond that nobody gave out.
"""

from collections.abc import Iterable

from pollux_agent.protocol import MAX_DECISION, read_decision

MOST_AHEAD = 2**31
"""How far a counter may have been set back: a decision a second for 68 years."""


def read_counter(text: str) -> int | None:
    """The last number given out; None if there is none that another can follow."""
    number = read_decision(text)
    return number if number is not None and number < MAX_DECISION else None


def next_number(last: int | None, found: Iterable[int]) -> int:
    """The number after ``last`` and after those of ``found`` that may have been given out.

    Without a counter that can be read each of ``found`` counts, up to half of what there is.
    """
    limit = MAX_DECISION // 2 if last is None else min(last + MOST_AHEAD, MAX_DECISION - 1)
    return 1 + max([last or 0, *(number for number in found if number <= limit)])
