"""One training on rented nodes: what goodput saves against throughput."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pollux.cli import app
from pollux.errors import TraceError
from pollux.simulate.autoscale import CloudSettings, Rental, rent
from pollux.simulate.synthetic import synthetic_traces
from pollux.traces import read_application


def both(traces: Path, name: str, most_nodes: int = 16) -> tuple[Rental, Rental]:
    application = read_application(traces, name, frozenset({"gpu"}))
    settings = CloudSettings(most_nodes=most_nodes)
    return rent(application, "goodput", settings), rent(application, "throughput", settings)


def hours_until(rental: Rental, nodes: int) -> float:
    return next(moment.time_s for moment in rental.course if moment.nodes >= nodes) / 3600


def test_by_goodput_a_training_grows_with_its_noise_and_costs_less() -> None:
    goodput, throughput = both(synthetic_traces(), "resnet18")
    assert goodput.node_s < throughput.node_s
    assert goodput.efficiency > throughput.efficiency
    early = goodput.course[len(goodput.course) // 4].nodes
    assert goodput.course[0].nodes == 1 < early <= goodput.course[-1].nodes
    assert goodput.course[-1].progress == throughput.course[-1].progress


def test_what_is_paid_is_the_area_under_the_nodes_restarts_included() -> None:
    for rental in both(synthetic_traces(), "deepspeech2"):
        last = rental.seconds - 60.0 * (len(rental.course) - 1)
        whole = sum(moment.nodes for moment in rental.course[:-1]) * 60.0
        assert rental.node_s == pytest.approx(whole + rental.course[-1].nodes * last, rel=1e-9)


@pytest.mark.needs("traces")
def test_imagenet_goes_as_the_paper_reports(recorded: Path) -> None:
    """Pollux Fig. 9: throughput takes all nodes early at low efficiency, goodput grows, costs less, and is
    little later. The paper's own figures, for up to ten nodes or so: 25 % cheaper, 6 % longer."""
    goodput, throughput = both(recorded, "imagenet", most_nodes=10)
    assert goodput.node_s < 0.9 * throughput.node_s
    assert goodput.seconds < 1.1 * throughput.seconds
    assert hours_until(throughput, 8) < 0.25
    assert hours_until(goodput, 10) > 0.25 * goodput.seconds / 3600
    early = slice(5, len(throughput.course) // 4)
    assert max(moment.efficiency for moment in throughput.course[early]) < 0.6
    assert min(moment.efficiency for moment in goodput.course[early]) > 0.5
    assert goodput.course[-1].nodes == 10


def test_a_wrong_policy_or_type_is_refused() -> None:
    application = read_application(synthetic_traces(), "bert", frozenset({"gpu"}))
    with pytest.raises(TraceError, match="use goodput or throughput"):
        rent(application, "greedy", CloudSettings())
    with pytest.raises(TraceError, match="bert was measured on gpu"):
        rent(application, "goodput", CloudSettings(gpu_type="abacus"))


def test_the_command_compares_the_two() -> None:
    done = CliRunner().invoke(app, ["autoscale", "--application", "bert", "--nodes", "4", "--json"])
    assert done.exit_code == 0, done.output
    rentals = json.loads(done.stdout)
    assert [rental["policy"] for rental in rentals] == ["goodput", "throughput"]
    assert all(1 <= rental["most_nodes"] <= 4 and rental["seconds"] > 0 for rental in rentals)
    table = CliRunner().invoke(app, ["autoscale", "--application", "bert", "--nodes", "2"])
    assert "x the cost" in table.output
    unknown = CliRunner().invoke(app, ["autoscale", "--application", "mind"])
    assert unknown.exit_code == 2 and "mind" in unknown.output
