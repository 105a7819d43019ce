"""The four estimates that choose a round's shape, each on its own."""

import pytest

from specker.runtime.control.costs import Costs
from specker.runtime.control.estimates import (
    AGAIN,
    APART,
    LOOK,
    LOOK_SHARE,
    MAX_DOUBLINGS,
    NONE,
    REFRESH,
    RUN,
    SWITCH,
    WAIT,
    Credit,
    PlainSpeed,
    TokenPrices,
    Trials,
)
from specker.runtime.control.policy import Budget


def test_credit_is_bounded_and_a_dear_trial_can_be_earned():
    credit = Credit()
    credit.add(100.0, price=3.0)
    assert credit.left == credit.at_most
    credit.add(100.0, price=40.0)
    assert credit.left == 40.0
    credit.add(-50.0, price=3.0)
    assert credit.left == -10.0
    credit.renew()
    assert credit.left == credit.renewed


def test_a_new_text_pays_for_prefills_and_takes_over_little_after_a_loss():
    credit = Credit(left=10.0, late=2.0)
    credit.admitted(lost=False, price=0.0)
    assert (credit.left, credit.late) == (8.0, 0.0)
    credit.admitted(lost=True, price=6.0)
    assert credit.left == 6.0
    credit.admitted(lost=True, price=1.0)
    assert credit.left == credit.carried_over


def test_trials_become_rarer_while_they_lose():
    trials, waits = Trials(), []
    for _ in range(MAX_DOUBLINGS + 2):
        trials.waited = next(n for n in range(1, WAIT << 9) if Trials(waited=n, lost=trials.lost).due)
        waits.append(trials.waited)
        trials.begin()
        gained = []
        for _ in range(RUN):
            trials.left -= 1
            gained.append(trials.finished(-0.5))
        assert gained == [-0.5] * (RUN - 1) + [-0.5 - SWITCH] and trials.waited == 0
    assert waits == [WAIT << min(n, MAX_DOUBLINGS) for n in range(MAX_DOUBLINGS + 2)]
    trials.admitted()
    assert (trials.lost, trials.left) == (1, 0)
    trials.begin()
    for _ in range(RUN):
        trials.left -= 1
        trials.finished(0.5)
    assert trials.lost == 0


def test_prices_are_made_anew_for_another_shape_and_after_some_rounds():
    prices, made = TokenPrices(), []

    def make():
        made.append(len(made))
        return (float(len(made)),)

    assert [prices.of("a", make) for _ in range(REFRESH)] == [(1.0,)] * REFRESH
    assert prices.of("a", make) == (2.0,) and prices.of("b", make) == (3.0,) and prices.of("a", make) == (4.0,)


def test_plain_decoding_is_measured_within_a_share_of_the_time():
    speed = PlainSpeed()
    for n in range(APART):
        assert not speed.due(0.0), n
        speed.drafted(1.0)
    assert speed.due(0.0) and speed.due(LOOK_SHARE * APART / LOOK) and not speed.due(LOOK_SHARE * APART / LOOK * 1.01)
    speed.begin()
    assert not speed.due(0.0)


def test_a_change_of_speed_changes_the_costs_of_drafts_too():
    costs, speed, shape = Costs(lambda budget: 0.5 * budget.depth), PlainSpeed(), Budget(4, 4)
    for _ in range(9):
        costs.measured(1, NONE, 0, 0.0, 1.0)
        costs.observe(1, shape, 4, draft=2.0, verify=1.5)
    plain, draft = costs.plain(1), costs.round(1, shape, 4)
    assert (plain, draft) == (pytest.approx(1.0, rel=0.1), pytest.approx(3.5, rel=0.1))
    for n in range(LOOK):
        speed.observe(costs, 1, 2 * plain, False)
        assert costs.plain(1) == pytest.approx(plain if n < LOOK - 1 else 2 * plain)
    assert costs.round(1, shape, 4) == pytest.approx(2 * draft)
    for n in range(AGAIN):  # while drafts rest every measurement counts, and it takes more rounds
        speed.observe(costs, 1, 2.2 * plain, True)
        assert costs.plain(1) == pytest.approx((2.0 if n < AGAIN - 1 else 2.2) * plain)
