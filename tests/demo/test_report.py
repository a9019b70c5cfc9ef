"""The words follow from the numbers, the bad ones too."""

from __future__ import annotations

from dataclasses import replace

from nvalchemi.demo.report import Motion, Score, listed, motion_sentence, score_sentence, span, times_better


def test_words_follow_the_numbers():
    assert times_better(100.0, 1000.0) == "10 times smaller"
    assert times_better(80.0, 100.0) == "20 % smaller"
    assert "learned nothing" in times_better(100.0, 100.0)
    assert "learned nothing" in times_better(float("nan"), 100.0)


def test_a_score_names_both_models():
    text = score_sentence(Score("molecules it never saw", 100, 61.2, 842.0, 45.0, 420.0))
    for number in ("100", "61", "842", "14 times", "45", "420", "9 times"):
        assert number in text


def test_a_dynamics_that_drifts_is_said_to():
    good = Motion("acetone", 1.0, 0.05, 0.1, 8.0, 60.0)
    bad = Motion("acetone", 1.0, 25.0, 7.0, 8.0, 600.0)
    assert "energy is kept" in motion_sentence(good, seen=False)
    assert "not kept" in motion_sentence(bad, seen=False)
    assert "too short" in motion_sentence(replace(bad, picoseconds=0.01), seen=False)
    assert "never saw" in motion_sentence(good, seen=False)
    assert "never saw" not in motion_sentence(good, seen=True)


def test_small_things():
    assert listed(["a"]) == "a"
    assert listed("abc") == "a, b and c"
    assert [span(s) for s in (3.21, 42.4, 89.9, 190.0, 119.7)] == ["3.2 s", "42 s", "90 s", "3 min 10 s", "2 min 0 s"]
