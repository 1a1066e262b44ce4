"""The experiments that the benchmarks run at length, small: capacity, what an Omega window covers, and no rule that explodes."""

from __future__ import annotations

import pytest
import torch

from benchmarks import capacity, stability

pytestmark = pytest.mark.usefixtures("flushed_denormals")


def test_capacity_is_the_feature_width() -> None:
    assert capacity.capacity(5, 1, 0)["stored"] == 6
    degree_two = capacity.capacity(5, 2, 0)
    assert degree_two["stored"] == degree_two["predicted"] == 21
    assert degree_two["stored_unit_keys"] == 20  # on the sphere sum x_i^2 = 1 makes one feature redundant


def test_an_omega_window_improves_what_it_covers_and_features_what_lies_behind() -> None:
    table = capacity.recall(seeds=4, seed=0)
    delta, omega, lifted = table["delta"], table["omega c=16"], table["omega c=16, degree 2"]
    assert omega["last_16"] < delta["last_16"] - 0.1  # the window
    assert omega["last_48"] > delta["last_48"]  # beyond it the window forgets more
    assert lifted["last_48"] < 0.7 * delta["last_48"]  # polynomial features keep more


@pytest.mark.parametrize("rule", list(stability.rules(0)))
def test_no_rule_explodes_on_adversarial_streams(rule: str) -> None:
    with torch.inference_mode():
        found = stability.survive(*stability.rules(0)[rule], tokens=16 * 256, call=64, seed=0)
    assert found["non_finite"] == 0
    assert found["state_over_value"] < 1000


def test_the_stability_check_can_fail() -> None:
    # Mutant tried: the chunk-start rule with a step fit only for exact gradients must show up as non-finite.
    step, state, deep, _ = stability.rules(0)["titans matrix chunk-start"]
    with torch.inference_mode():
        found = stability.survive(step, state, deep, 1.0 / 4.0, tokens=16 * 512, call=64, seed=0)
    assert found["non_finite"] > 0
