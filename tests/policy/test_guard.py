"""The guard gives moving up only where it is slower, and one slow token decides nothing."""

from dynajax.policy.guard import BLOCK, LOSS, ROUNDS, WARM_UP, Guard


def run(moving_s, still_s, disturb=lambda token: 1.0):
    """A guard fed with tokens of these times until it knows; -> the guard and what each token did."""
    guard, did = Guard(), []
    while guard.pays is None:
        did.append(guard.moving)
        guard.add((moving_s if guard.moving else still_s) * disturb(len(did)))
    return guard, did


def test_moves_and_rests_take_turns_after_a_warm_up():
    _, did = run(1.0, 1.0)
    assert did == [True] * WARM_UP + ([True] * BLOCK + [False] * BLOCK) * ROUNDS


def test_what_is_slower_is_given_up_and_what_is_not_is_kept():
    assert run(1.0, 1.2)[0].moving
    assert run(1.0, 1.0)[0].moving
    assert run(LOSS - 0.01, 1.0)[0].pays
    slow, _ = run(1.2, 1.0)
    assert not slow.moving and slow.pays is False and abs(slow.slowdown - 1.2) < 1e-9
    slow.add(0.0)
    assert not slow.moving, "it was decided"


def test_outliers_and_the_warm_up_decide_nothing():
    assert run(1.0, 1.0, lambda token: 100.0 if token <= WARM_UP or token % 7 == 0 else 1.0)[0].pays
    assert not run(1.2, 1.0, lambda token: 0.01 if token % 7 == 0 else 1.0)[0].pays
