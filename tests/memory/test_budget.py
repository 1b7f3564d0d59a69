"""Budgets: what fits is shared out, what does not is refused with numbers and the setting to change."""

from __future__ import annotations

import pytest

from qsa.errors import BudgetError
from qsa.memory import budget
from qsa.memory.budget import (
    CardMemory,
    StageNeed,
    available_host_bytes,
    gib,
    share_cards,
    share_host,
)

MIB = 1 << 20


def need(weights: int = 100, workspace: int = 10, wanted: int = 80, sequence: int = 10, least: int = 2) -> StageNeed:
    return StageNeed(weights * MIB, workspace * MIB, wanted, sequence, least)


def cards(*free: int) -> list[CardMemory]:
    """A card for each number of free MiB; a negative one is the card before, looked at again."""
    found = []
    for place, number in enumerate(free):
        name = found[-1].card if number < 0 else f"card {place}"
        found.append(CardMemory(name, "H200", abs(number) * MIB, 2000 * MIB))
    return found


def test_a_pool_is_as_large_as_wanted_up_to_its_share():
    assert share_host([need(), need(wanted=60)], 4000 * MIB, None) == (80, 60)
    assert share_host([need(), need()], 300 * MIB, None) == (40, 40)  # 300 - 220 left for both, less than 40 % of 300
    assert share_host([need(1), need(1)], 300 * MIB, None) == (60, 60)  # 40 % of 300
    assert share_host([need()], 120 * MIB, None) == (10,)  # exactly one sequence


def test_a_configured_pool_is_taken_as_it_is():
    assert share_host([need(), need()], 4000 * MIB, 123 * MIB) == (123, 123)
    assert share_host([need(), need()], 4000 * MIB, 2 * MIB) == (2, 2)  # shorter requests only
    assert share_cards([need(), need()], cards(500, 400), 290 * MIB) == (290, 290)
    assert share_cards([need(), need()], cards(800, -805), 290 * MIB) == (290, 290)  # 800 - 220 for both


def test_cards_are_shared_one_by_one():
    needs = [need(wanted=10**6), need(wanted=50)]
    assert share_cards(needs, cards(1110, 500), None) == (970, 50)  # 97 % of what is left, and what is wanted


def test_stages_on_one_card_share_what_both_leave_by_what_a_sequence_takes():
    needs = [need(wanted=10**6, sequence=17), need(wanted=10**6, sequence=13)]
    first, second = share_cards(needs, cards(1240, -1220), None)  # the second look saw the first process too
    assert (first, second) == (int(970 * 17 / 30), int(970 * 13 / 30))


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (lambda: share_host([need(1000)], 500 * MIB, None), r"1 stages need 1010 MiB, 500 MiB are available.*model\.path"),
        (lambda: share_host([need(10, 900)], 500 * MIB, None), r"need 910 MiB, .* lower limits\.max_sequences, limits"),
        (lambda: share_host([need()], 119 * MIB, None), r"takes 10 chunks .* only 9 are to spare; lower model\.max_model_len"),
        (lambda: share_host([need()], 200 * MIB, 100 * MIB), r"210 MiB in all, but 200 MiB .* to at most 90 MiB"),
        (lambda: share_host([need()], 900 * MIB, MIB), r"shortest request takes 2 chunks .* at least 2 MiB \(10 MiB for"),
        (lambda: share_cards([need(), need()], cards(900, 120), 50 * MIB), r"stage 1 needs 110 MiB .* 120 MiB of .* most 10"),
        (lambda: share_cards([need()], cards(105), None), r"105 MiB of .* raise pipeline\.num_stages.*model\.quantization"),
        (lambda: share_cards([need(), need()], cards(205, -205), None), r"2 stages on one card need 220 MiB .*gpus_per_stage"),
        (lambda: share_cards([need()], cards(115), None), r"only 4 are to spare"),
    ],
)  # fmt: skip
def test_refusals_say_what_to_change(share, text):
    with pytest.raises(BudgetError, match=text):
        share()


def test_probes_see_this_machine():
    available = available_host_bytes()
    assert 64 * MIB < available < 1 << 50


@pytest.mark.parametrize(
    ("limit", "usage", "cached", "expected"),
    [
        ("1000", "400", 0, 600),
        ("1000", "990", 700, 710),  # a checkpoint that was read fills the container with pages that can be dropped
        ("1000", "1200", 100, 0),
        ("max", "400", 0, 8192 * 1024),
    ],
)
def test_a_containers_limit_counts_and_its_cached_files_do_not(limit, usage, cached, expected, tmp_path, monkeypatch):
    texts = {"meminfo": "MemTotal: 9000 kB\nMemAvailable: 8192 kB\n", "limit": limit, "usage": usage}
    texts["stat"] = f"anon 5\ninactive_file {cached}\nactive_file 7\n"
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(budget, "_MEMINFO", tmp_path / "meminfo")
    files = (tmp_path / "limit", tmp_path / "usage", tmp_path / "stat", "inactive_file")
    monkeypatch.setattr(budget, "_CGROUPS", ((tmp_path / "none",) * 3 + ("inactive_file",), files))
    assert available_host_bytes() == expected


def test_sizes_read_well():
    assert (gib(3 << 30), gib(100 * MIB), gib((1 << 30) - 1)) == ("3.0 GiB", "100 MiB", "1024 MiB")
