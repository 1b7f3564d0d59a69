"""The ratio of a first request to the tenth: of one start each, the median over the starts."""

from __future__ import annotations

from benchmarks.bench_first_request import NUM_REQUESTS, prompts, summarise
from qsa.config import make_config


def test_ratios_are_those_of_neighbours_in_a_start():
    rows = [
        {"start": start, "request": number, "total_s": first if number == 1 else last, "first_token_s": 1.0, "ready_s": 9.0}
        for start, (first, last) in enumerate([(2.0, 1.0), (1.1, 1.0), (9.0, 10.0)])
        for number in range(1, NUM_REQUESTS + 1)
    ]
    total, token, ready = summarise(rows, None)
    assert (total.name, total.value, total.met) == ("operators.first_request_over_tenth", 1.1, True)
    assert token.value == 1.0 and ready.value == 9.0
    assert summarise(rows, "card")[0].name == "operators.card.first_request_over_tenth"


def test_every_request_has_a_prompt_of_its_own():
    cases = prompts(make_config({}), 3000)
    assert len({tuple(case) for case in cases}) == NUM_REQUESTS and {len(case) for case in cases} == {3000}
