"""Which decision number comes next: what stands on jobs is anybody's, and the counter may have been lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.cluster.numbers import MOST_AHEAD, next_number, read_counter
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import MAX_DECISION, Allocation, decode, encode

NUMBERS = st.one_of(
    st.integers(0, 1000), st.integers(0, MAX_DECISION), st.sampled_from([MOST_AHEAD, MAX_DECISION])
)


@given(last=NUMBERS.filter(lambda number: number < MAX_DECISION), found=st.lists(NUMBERS))
def test_a_number_is_new_fits_its_document_and_is_above_all_that_were_given_out(
    last: int, found: list[int]
) -> None:
    number = next_number(last, found)
    assert last < number <= MAX_DECISION
    assert all(number > other for other in found if other <= last + 1_000_000)
    assert decode(Allocation, encode(Allocation(decision=number))).decision == number


@given(acted=st.lists(st.integers(0, 10**9)), forged=st.lists(st.integers(2**52 + 1, MAX_DECISION)))
def test_without_a_counter_no_number_is_given_twice_that_a_driver_acted_on(
    acted: list[int], forged: list[int]
) -> None:
    """10**9: a decision a second for 31 years."""
    assert next_number(None, [*acted, *forged]) == max(acted, default=0) + 1


def test_forged_numbers_never_use_the_numbers_up() -> None:
    """Somebody writes the worst that counts on a pod, each minute for a year."""
    last = 0
    for _ in range(365 * 24 * 60):
        last = next_number(last, [MAX_DECISION, min(last + MOST_AHEAD, MAX_DECISION)])
    assert last < MAX_DECISION // 4


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-1",
        "+1",
        " 1",
        "007",
        "1e21",
        "1.0",
        "0x10",
        "\u00b2",
        "\u0663",
        "{}",
        "999999999999999999999",
        "9" * 5000,
        str(MAX_DECISION),
        "9007199254740993",
    ],
)
def test_a_counter_that_holds_anything_else_holds_no_number(text: str) -> None:
    assert read_counter(text) is None


@pytest.mark.parametrize("number", [0, 1, 57, 9007199254740000])
def test_a_counter_is_read_in_plain_digits(number: int) -> None:
    assert read_counter(str(number)) == number


def test_a_document_has_no_number_that_json_readers_cannot_keep() -> None:
    with pytest.raises(DocumentError, match="decision"):
        decode(Allocation, '{"decision": 9007199254740993}')
