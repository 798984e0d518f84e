"""Nothing that an agent wrote is trusted."""

import json
from typing import Any

import pytest

from pollux.store import read_report

JOB = "digits-0123456789"
FIT = {
    "alpha_grad": 0.1,
    "beta_grad": 0.01,
    "alpha_sync_local": 0.02,
    "beta_sync_local": 0.001,
    "alpha_sync_node": 0.05,
    "beta_sync_node": 0.002,
    "gamma": 1.5,
}
PLAIN: dict[str, Any] = {
    "schema": 1,
    "job_id": JOB,
    "incarnation": 2,
    "sequence": 7,
    "time_unix_s": 1.7e9,
    "fits": {"gpu": FIT},
    "noise_scale": 400.0,
    "initial_batch_size": 32,
    "max_batch_size": 1024,
    "max_local_batch_size": 128,
    "max_gpus_seen": 2,
}


def text(**changes: object) -> str:
    return json.dumps(PLAIN | changes)


def test_a_sound_report_is_read_without_remarks() -> None:
    report, remarks = read_report(JOB, text())
    assert remarks == ()
    assert report is not None
    assert (report.sequence, report.noise_scale, report.fits["gpu"].gamma) == (7, 400.0, 1.5)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        pytest.param(None, "not reported", id="no report yet"),
        pytest.param("", "no JSON", id="empty"),
        pytest.param("{" * 5000, "no JSON", id="nested without end"),
        pytest.param("null", "malformed", id="no object"),
        pytest.param('{"schema": 1}', "malformed", id="fields missing"),
        pytest.param(text(schema=2), "newer than this scheduler", id="from a newer agent"),
        pytest.param(text(extra=1), "malformed", id="an unknown field"),
        pytest.param(text(job_id="another"), "belongs to job", id="another job's report"),
        pytest.param(text(noise_scale=float("nan")), "malformed", id="NaN"),
        pytest.param(text(noise_scale=-1.0), "malformed", id="a negative noise scale"),
        pytest.param(text(max_batch_size="many"), "malformed", id="a word for a number"),
        pytest.param(text(fits={"gpu": FIT | {"gamma": float("inf")}}), "", id="infinity in the fit"),
        pytest.param(text(job_id="x" * 9000), "characters", id="cut by the store"),
    ],
)
def test_what_cannot_be_read_is_not_fitted_and_said_in_words(found: str | None, said: str) -> None:
    report, remarks = read_report(JOB, found)
    assert report is None or not report.fits
    assert remarks
    assert said in remarks[0]
    assert all(len(remark) <= 300 for remark in remarks)


@pytest.mark.parametrize(
    "fit",
    [
        pytest.param(FIT | {"beta_grad": 1e308}, id="infinity as SQL gives it back"),
        pytest.param(FIT | {"alpha_grad": -0.1}, id="negative seconds"),
        pytest.param(FIT | {"gamma": 0.0}, id="gamma below 1"),
        pytest.param(FIT | {"alpha_grad": 0.0, "beta_grad": 0.0}, id="a step that takes no time"),
    ],
)
def test_an_absurd_fit_is_left_out_and_the_sound_one_stays(fit: dict[str, float]) -> None:
    report, remarks = read_report(JOB, text(fits={"bad": fit, "good": FIT}))
    assert report is not None
    assert set(report.fits) == {"good"}
    assert "'bad'" in remarks[0]


def test_absurd_figures_are_taken_as_unknown() -> None:
    report, remarks = read_report(JOB, text(noise_scale=1.797e308, goodput=1e301, progress=1e302))
    assert report is not None
    assert (report.noise_scale, report.goodput, report.progress) == (None, None, 0.0)
    assert all(name in remarks[0] for name in ("noise_scale", "goodput", "progress"))
    assert set(report.fits) == {"gpu"}
