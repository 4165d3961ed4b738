"""What samples say, and how sure."""

from __future__ import annotations

import math
import random

import pytest

from attnscope.verdicts import TOO_CLOSE, mean_interval, noise_fraction, verdict_on, verdicts_of, word_for


def samples(factor: float, noise: float = 0.01, n: int = 30, seed: int = 0) -> list[tuple[float, float]]:
    """(time, rival's time) pairs with a common drift that pairing must take out."""
    chance = random.Random(seed)
    pairs = []
    for index in range(n):
        drift = 1 + 0.3 * index / n
        mine, other = (drift * math.exp(chance.gauss(0, noise)) for _ in range(2))
        pairs.append((factor * mine, other))
    return pairs


@pytest.mark.parametrize(
    ("factor", "noise", "word"),
    [
        (0.8, 0.02, "faster"),
        (1.2, 0.02, "slower"),
        (1.0, 0.003, "same"),
        (1.005, 0.002, "same"),
        (1.03, 0.2, TOO_CLOSE),
        (1.0, 0.1, TOO_CLOSE),
    ],
)
def test_words_on_synthetic_samples(factor, noise, word):
    verdict = verdict_on("forward", "a", "b", samples(factor, noise))
    assert verdict.word == word
    assert verdict.ratio_low <= verdict.ratio <= verdict.ratio_high
    assert verdict.ratio == pytest.approx(factor, rel=4 * noise / math.sqrt(30) + 1e-3)


def test_rare_outliers_do_not_turn_a_verdict():
    pairs = samples(0.9, 0.01)
    for index in (3, 11, 20):
        pairs[index] = (50 * pairs[index][0], pairs[index][1])
    assert verdict_on("forward", "a", "b", pairs).word == "faster"


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    covered = 0
    for seed in range(400):
        _, low, high = mean_interval([math.log(a / b) for a, b in samples(1.1, 0.05, n=12, seed=seed)])
        covered += low <= math.log(1.1) <= high
    assert 0.92 < covered / 400 < 0.98


def test_one_round_is_too_few_and_two_must_differ_grossly():
    once = verdict_on("forward", "a", "b", [(1.0, 9.0)])
    assert once.word == TOO_CLOSE
    assert math.isfinite(once.ratio_high)
    assert verdict_on("forward", "a", "b", [(1.0, 9.0), (1.1, 9.0)]).word == "faster"
    assert verdict_on("forward", "a", "b", [(1.0, 1.2), (1.1, 1.4)]).word == TOO_CLOSE


def test_faster_needs_both_figures():
    isolated = samples(0.8)
    assert verdict_on("forward", "a", "b", isolated, [(0.8, 1.0), (0.85, 1.0)]).word == "faster"
    for sustained in ([(1.1, 1.0), (1.1, 1.0)], [(1.0, 1.0), (1.0, 1.0)], [(0.9, 1.0), (1.1, 1.0)]):
        assert verdict_on("forward", "a", "b", isolated, sustained).word == TOO_CLOSE


def test_same_needs_both_figures_and_the_sustained_ratio_is_told():
    isolated = samples(1.0, 0.002)
    assert verdict_on("forward", "a", "b", isolated, [(1.002, 1.0), (0.999, 1.0)]).word == "same"
    contradicted = verdict_on("forward", "a", "b", isolated, [(1.05, 1.0), (1.05, 1.0)])
    assert contradicted.word == TOO_CLOSE
    assert contradicted.sustained_ratio == pytest.approx(1.05)


def test_an_interval_within_one_percent_is_same_even_beside_one():
    assert word_for(math.log(1.001), math.log(1.005)) == "same"
    assert word_for(math.log(1.001), math.log(1.02)) == "slower"
    assert word_for(math.log(0.98), math.log(1.002)) == TOO_CLOSE


def test_each_is_judged_against_the_best_other_one():
    rounds = {"slow": 3.0, "best": 1.0, "second": 1.5}
    isolated = {name: dict.fromkeys(range(5), ms) for name, ms in rounds.items()}
    found = {v.implementation: v for v in verdicts_of("backward", isolated, {})}
    assert {name: v.rival for name, v in found.items()} == {"slow": "best", "best": "second", "second": "best"}
    assert [found[name].word for name in ("slow", "best", "second")] == ["slower", "faster", "slower"]
    assert found["slow"].ratio == pytest.approx(3.0)
    assert found["slow"].sustained_ratio is None


def test_ours_are_judged_against_the_best_of_the_others_too():
    rounds = {"mine": 1.0, "cudnn": 1.5, "also_mine": 1.2, "flash": 1.4}
    isolated = {name: dict.fromkeys(range(5), ms) for name, ms in rounds.items()}
    found = [(v.implementation, v.rival) for v in verdicts_of("forward", isolated, {}, {"mine", "also_mine"})]
    assert found == [
        ("mine", "also_mine"), ("mine", "flash"), ("cudnn", "mine"), ("also_mine", "mine"), ("also_mine", "flash"),
        ("flash", "mine"),
    ]  # fmt: skip
    alone = verdicts_of("forward", {name: isolated[name] for name in ("mine", "also_mine")}, {}, {"mine", "also_mine"})
    assert [v.rival for v in alone] == ["also_mine", "mine"]


def test_only_rounds_that_hold_both_are_paired_and_a_lone_rival_has_no_verdict():
    isolated = {"a": {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}, "b": {0: 2.0, 1: 2.0, 2: 2.0, 9: 0.1}}
    assert verdicts_of("forward", isolated, {})[0].ratio == pytest.approx(0.5)
    assert verdicts_of("forward", {"a": {0: 1.0}}, {}) == []
    assert verdicts_of("forward", {"a": {0: 1.0}, "b": {1: 1.0}}, {}) == []


def test_noise_is_half_the_spread_over_the_median():
    times = [1.0 + step / 100 for step in range(11)]
    assert noise_fraction(times) == pytest.approx(0.03 / 1.05)
    assert noise_fraction([2.0, 2.0]) == 0
