"""Documents come back as they went out, and a malformed one is refused by field, value and fix."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux_agent.errors import DocumentError
from pollux_agent.model.throughput import ThroughputParams
from pollux_agent.protocol import (
    Allocation,
    Event,
    JobSpec,
    Outcome,
    Report,
    decode,
    encode,
    from_plain,
    to_plain,
)

SPEC = {
    "name": "digits",
    "script": "digits.py",
    "initial_batch_size": 32,
    "max_local_batch_size": 256,
    "max_gpus": 4,
}

FIT = ThroughputParams(
    alpha_grad=0.1,
    beta_grad=0.01,
    alpha_sync_local=0.0,
    beta_sync_local=0.0,
    alpha_sync_node=0.0,
    beta_sync_node=0.0,
    gamma=1.0,
)

REPORT = {
    "job_id": "digits-0",
    "incarnation": 1,
    "sequence": 2,
    "time_unix_s": 3.0,
    "initial_batch_size": 32,
    "max_batch_size": 1024,
    "max_local_batch_size": 256,
    "max_gpus_seen": 1,
}


@pytest.mark.parametrize(
    ("change", "want"),
    [
        pytest.param({"script": None}, "script", id="a script of the wrong type"),
        pytest.param({"max_gpus": 0}, "max_gpus", id="no GPU at all"),
        pytest.param({"max_gpus": 1, "min_gpus": 2}, "max_gpus is 1, below min_gpus 2", id="max below min"),
        pytest.param({"initial_batch_size": "32"}, "initial_batch_size", id="a number as text"),
        pytest.param({"initial_batch_size": 32.5}, "initial_batch_size", id="half a sample"),
        pytest.param({"initial_batch_size": True}, "initial_batch_size", id="true is no number"),
        pytest.param({"max_batch_size": 16}, "max_batch_size is 16", id="max batch below M0"),
        pytest.param({"min_local_batch_size": 512}, "max_local_batch_size is 256", id="local bounds crossed"),
        pytest.param(
            {"initial_batch_size": 1, "min_local_batch_size": 32, "min_gpus": 2},
            "cannot be split over min_gpus 2",
            id="a least batch above the largest",
        ),
        pytest.param(
            {
                "initial_batch_size": 100,
                "max_batch_size": 100,
                "max_local_batch_size": 10,
                "min_local_batch_size": 10,
                "min_gpus": 3,
            },
            "cannot be split over min_gpus 3",
            id="a batch that comes out even on no such gang",
        ),
        pytest.param({"initial_batch_size": 10**30}, "initial_batch_size", id="a batch beyond all bounds"),
        pytest.param({"scaling_rule": "cubic"}, "scaling_rule", id="unknown scaling rule"),
        pytest.param(
            {"kind": "rigid", "min_gpus": 2}, "rigid job has one GPU count", id="rigid with a range"
        ),
        pytest.param({"kind": "hybrid_parallel"}, "not supported yet", id="hybrid parallel"),
        pytest.param({"gpus_per_replica": 2}, "not supported yet", id="several GPUs a replica"),
        pytest.param(
            {"estimator": "latency"},
            "latency_limit_s is not given",
            id="a promise of nothing",
        ),
        pytest.param(
            {"latency_limit_s": 0.1},
            "means nothing to estimator training",
            id="a training with a promise",
        ),
        pytest.param({"estimator": "os.path:__import__('os')"}, "estimator", id="code for a name"),
        pytest.param(
            {"reserved_from_unix_s": 2.0, "reserved_until_unix_s": 1.0},
            "reserved_until_unix_s is 1.0",
            id="a reservation that ends before it begins",
        ),
        pytest.param({"priority": 0.0}, "priority", id="a priority of nothing"),
        pytest.param({"priority": 1e9}, "priority", id="a priority above all others"),
        pytest.param({"env": {"POLLUX_NODE": "x"}}, "POLLUX_NODE", id="a variable that we set"),
        pytest.param({"env": {"A B": "x"}}, "'A B'", id="no variable name"),
        pytest.param({"env": {"A": "x\0"}}, "NUL", id="a value that no process can be given"),
        pytest.param({"arguments": ["a\0b"]}, "NUL", id="an argument that no process can be given"),
        pytest.param({"arguments": ["x" * 300_000]}, "300000 bytes", id="an argument beyond all limits"),
        pytest.param({"learning_rate": 0.1}, "learning_rate: unknown field", id="unknown field"),
        pytest.param({"schema": 2}, "schema", id="a newer schema"),
        pytest.param({"name": ""}, "name", id="empty name"),
    ],
)
def test_a_malformed_spec_is_refused_by_field(change: dict[str, object], want: str) -> None:
    with pytest.raises(DocumentError, match="JobSpec") as refused:
        from_plain(JobSpec, SPEC | change)
    assert want in str(refused.value)


@pytest.mark.parametrize("field", sorted(SPEC))
def test_a_missing_field_is_named(field: str) -> None:
    plain = {name: value for name, value in SPEC.items() if name != field}
    with pytest.raises(DocumentError, match=f"{field}: missing; add it"):
        from_plain(JobSpec, plain)


def test_the_largest_batch_defaults_to_32_times_the_first() -> None:
    assert from_plain(JobSpec, SPEC).batch_size_limit == 32 * 32
    assert from_plain(JobSpec, SPEC | {"max_batch_size": 64}).batch_size_limit == 64


@pytest.mark.parametrize("text", ["", "null", "[]", "{", '"x"', "{}", '{"a": 1}'])
def test_text_that_is_no_document_is_refused(text: str) -> None:
    for kind in (JobSpec, Report, Outcome, Event):
        with pytest.raises(DocumentError):
            decode(kind, text)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["noise_scale", "progress", "mean_restart_s", "time_unix_s"])
def test_a_report_holds_no_number_that_is_not_finite(field: str, value: str) -> None:
    text = json.dumps(REPORT | {field: "@"}).replace('"@"', value)
    with pytest.raises(DocumentError, match=field):
        decode(Report, text)


@pytest.mark.parametrize("field", ["restarts", "max_gpus_seen", "sequence"])
def test_a_report_holds_no_count_beyond_all_bounds(field: str) -> None:
    with pytest.raises(DocumentError, match=field):
        decode(Report, json.dumps(REPORT | {field: 10**400}))


def test_a_fit_that_is_not_finite_is_refused_with_its_path() -> None:
    fit = to_plain(from_plain(Report, REPORT | {"fits": {"cpu": FIT}}))["fits"]["cpu"] | {
        "gamma": float("nan")
    }
    with pytest.raises(DocumentError, match=r"fits\.cpu\.gamma"):
        from_plain(Report, REPORT | {"fits": {"cpu": fit}})


def test_an_allocation_of_zero_gpus_on_a_node_is_refused() -> None:
    with pytest.raises(DocumentError, match=r"placement\.node-0"):
        from_plain(Allocation, {"decision": 1, "placement": {"node-0": 0}})


names = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cs",), exclude_characters="\0"), min_size=1, max_size=30
)
counts = st.integers(1, 10**6)


@settings(deadline=None, max_examples=50)
@given(
    name=names,
    script=names,
    arguments=st.lists(names, max_size=3),
    first=counts,
    factor=st.integers(1, 64),
    gpus=st.tuples(st.integers(1, 64), st.integers(0, 64)),
    epochs=st.none() | counts,
)
def test_a_spec_comes_back_as_it_went_out(
    name: str,
    script: str,
    arguments: list[str],
    first: int,
    factor: int,
    gpus: tuple[int, int],
    epochs: int | None,
) -> None:
    spec = JobSpec(
        name=name,
        script=script,
        arguments=tuple(arguments),
        initial_batch_size=first,
        max_batch_size=first * factor,
        max_local_batch_size=first,
        min_gpus=min(gpus[0], first),
        max_gpus=sum(gpus),
        epochs=epochs,
    )
    assert decode(JobSpec, encode(spec)) == spec
    assert from_plain(JobSpec, to_plain(spec)) == spec


@settings(deadline=None, max_examples=50)
@given(placement=st.dictionaries(names, st.integers(1, 8), max_size=4), decision=st.integers(0, 10**9))
def test_an_allocation_comes_back_as_it_went_out(placement: dict[str, int], decision: int) -> None:
    allocation = Allocation(decision=decision, placement=placement)
    assert decode(Allocation, encode(allocation)) == allocation
    assert allocation.num_gpus == sum(placement.values())


def test_equal_documents_give_equal_text_whatever_the_order_of_keys() -> None:
    one = Allocation(decision=1, placement={"a": 1, "b": 2})
    two = Allocation(decision=1, placement={"b": 2, "a": 1})
    assert encode(one) == encode(two)


def test_a_document_of_another_version_says_so_and_what_to_do() -> None:
    with pytest.raises(DocumentError, match=r"schema: version 2 is not one .* upgrade pollux-agent"):
        decode(Allocation, '{"schema": 2, "decision": 3}')


@pytest.mark.parametrize(
    ("done", "asked", "want"),
    [
        pytest.param({"epochs": 3}, {"epochs": 5}, True, id="more epochs"),
        pytest.param({"epochs": 3}, {"epochs": 3}, False, id="as many"),
        pytest.param({"epochs": 5}, {"epochs": 3}, False, id="fewer"),
        pytest.param({"epochs": 3}, {"epochs": 3, "max_gpus": 9}, False, id="as many on more GPUs"),
        pytest.param({}, {"arguments": ("--epochs", "9")}, True, id="the script's number, by its arguments"),
        pytest.param({}, {}, False, id="nothing new"),
    ],
)
def test_a_done_job_is_extended_by_asking_for_more(
    done: dict[str, Any], asked: dict[str, Any], want: bool
) -> None:
    plain: dict[str, Any] = {
        "name": "job",
        "script": "x.py",
        "initial_batch_size": 8,
        "max_local_batch_size": 8,
        "max_gpus": 4,
    }
    assert JobSpec(**plain | asked).extends(JobSpec(**plain | done)) is want
