"""Learning-rate rules against the papers' formulas."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux_agent.errors import DocumentError
from pollux_agent.torch.scaling import RULES, AdaScale, FollowsExamples, Legw, rule


@pytest.mark.parametrize(
    ("name", "batch_size", "noise_scale", "want"),
    [
        pytest.param("none", 128, 50.0, 1.0, id="none"),
        pytest.param("legw", 128, None, 2.0, id="LEGW without a place to look for its warm-up"),
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
    with pytest.raises(DocumentError, match=r"'adamscale'.*adascale, sqrt, linear, legw, none"):
        rule("adamscale")


@pytest.mark.parametrize("batch_size", [32, 128, 512])
def test_legw_warms_up_over_as_many_steps_at_every_batch_size(batch_size: int) -> None:
    """Batches k times as large warm up over k times the samples, to sqrt(k) (You et al. 2019)."""
    examples = 0
    warming = Legw(warm_up_steps=10)
    warming.follow(lambda: examples)
    factors = []
    for _ in range(12):
        factors.append(warming.factor(batch_size=batch_size, initial_batch_size=32, noise_scale=7.0))
        examples += batch_size
    full = math.sqrt(batch_size / 32)
    assert factors == pytest.approx([full * min(1.0, step / 10) for step in range(1, 13)])


def test_legw_warms_up_again_for_what_a_raised_batch_asks() -> None:
    warming = Legw(warm_up_steps=10)
    warming.follow(lambda: 320)
    assert warming.factor(batch_size=32, initial_batch_size=32, noise_scale=None) == 1.0
    assert warming.factor(batch_size=128, initial_batch_size=32, noise_scale=None) == pytest.approx(0.7)
    assert Legw(0).factor(batch_size=128, initial_batch_size=32, noise_scale=None) == 2.0
    with pytest.raises(DocumentError, match="warm_up_steps is -1"):
        Legw(-1)


class Cubic:
    """A user's rule: the cube root."""

    def factor(self, *, batch_size: int, initial_batch_size: int, noise_scale: float | None) -> float:
        return float((batch_size / initial_batch_size) ** (1 / 3))


class Wrong(Cubic):
    """A user's rule that goes wrong."""

    def factor(self, *, batch_size: int, initial_batch_size: int, noise_scale: float | None) -> float:
        return math.nan


def test_a_script_may_give_a_rule_of_its_own() -> None:
    own = rule(Cubic())
    assert own.factor(batch_size=256, initial_batch_size=32, noise_scale=None) == pytest.approx(2.0)
    assert isinstance(own, FollowsExamples)
    with pytest.raises(DocumentError, match="Wrong gave nan for batch_size=64"):
        rule(Wrong()).factor(batch_size=64, initial_batch_size=32, noise_scale=None)
    with pytest.raises(DocumentError, match="no method `factor`"):
        rule(3)  # type: ignore[arg-type]
