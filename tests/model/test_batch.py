"""Segments and how a step is cut into groups."""

from __future__ import annotations

import pytest

from qsa.model.batch import Segment, split_groups


def test_decodes_run_together_and_every_prefill_by_itself():
    decode = [Segment(slot, 10, 11, 0, False) for slot in (3, 1)]
    prefill = [Segment(slot, 0, 64, 0, True) for slot in (0, 2)]
    assert split_groups([*decode, *prefill]) == [decode, [prefill[0]], [prefill[1]]]
    assert split_groups(prefill) == [[prefill[0]], [prefill[1]]]
    assert split_groups([]) == []


def test_a_segment_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="start < end"):
        Segment(0, 5, 5, 0, True)
    with pytest.raises(ValueError, match="one token, got 2"):
        Segment(0, 5, 7, 0, False)
    assert Segment(0, 5, 6, 0, True).extend_len == 1  # a prefill chunk of one token stays a prefill
