"""Learning-rate rules against the papers' formulas."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux_agent.errors import DocumentError
from pollux_agent.torch.scaling import RULES, AdaScale, rule


@pytest.mark.parametrize(
    ("name", "batch_size", "noise_scale", "want"),
    [
        pytest.param("none", 128, 50.0, 1.0, id="none"),
        pytest.param("linear", 128, 50.0, 4.0, id="linear"),
        pytest.param("sqrt", 128, None, 2.0, id="square root"),
        pytest.param("adascale", 128, None, 1.0, id="AdaScale before phi is known"),
        pytest.param("adascale", 128, 0.0, 1.0, id="AdaScale without noise"),
        pytest.param("adascale", 128, 64.0, 4 * 96 / 192, id="AdaScale"),
    ],
)
def test_factor(name: str, batch_size: int, noise_scale: float | None, want: float) -> None:
    got = rule(name).factor(batch_size=batch_size, initial_batch_size=32, noise_scale=noise_scale)
    assert isinstance(got, float)
    assert got == pytest.approx(want)


@given(
    sqr=st.floats(1e-3, 1e3), var=st.floats(1e-3, 1e6), initial=st.integers(1, 1000), scale=st.integers(1, 64)
)
@settings(deadline=None)
def test_adascale_is_the_papers_gain_ratio(sqr: float, var: float, initial: int, scale: int) -> None:
    sigma = var / initial
    want = (sigma + sqr) / (sigma / scale + sqr)
    got = AdaScale().factor(batch_size=initial * scale, initial_batch_size=initial, noise_scale=var / sqr)
    assert got == pytest.approx(want, rel=1e-9)
    assert 1 - 1e-9 <= got <= scale * (1 + 1e-9)


@pytest.mark.parametrize("name", list(RULES))
def test_at_the_initial_batch_size_the_rate_is_the_scripts(name: str) -> None:
    for noise_scale in (None, 0.0, 17.0, math.inf):
        factor = rule(name).factor(batch_size=32, initial_batch_size=32, noise_scale=noise_scale)
        assert factor == pytest.approx(1.0)


def test_an_unknown_rule_names_those_known() -> None:
    with pytest.raises(DocumentError, match=r"'adamscale'.*adascale, sqrt, linear, none"):
        rule("adamscale")
