"""What is recorded of live probes fits into the log, whatever nodes, questions and answers are like."""

from __future__ import annotations

import json

import numpy as np
import pytest

from consistency.inference import MAX_NAME, Output
from consistency.live import MAX_KEPT_BODY, Heard, Judgement, Ledger, Moment, Order, Question, judge
from consistency.live_command import MAX_ACTIONS
from consistency.live_report import MAX_RECORDED, Ran, as_json, as_text, for_record
from consistency.report import MAX_RECORD_BYTES

ROWS = 512


def ran(nodes: int, name: str, body: bytes, samples: int, action: str, planes: int = 1) -> Ran:
    names = [f"{at:03}{name}"[:128] for at in range(nodes)]
    ledger = Ledger({"primary": names[::2], "standby": names[1::2]})
    question = Question(name[:128], body, ROWS, "close")
    applied = {f"{at:02}{name}": (2**60, 2**60) for at in range(planes)}
    first, second = (
        Heard(node, name, applied, (Output(name, "FP32", (ROWS,), np.full(ROWS, at)),)) for at, node in enumerate(names[:2], 1)
    )
    for at in range(samples):
        ledger.add(question, first, second, judge(question, first, second, ("F32",)), Moment(at, at, Order(1, 2, name, 3)))
    for node in names:
        silent = Judgement(judge(question, first._replace(outputs=None), second, ()).kind, silent=node)
        ledger.add(question, first, second, silent, Moment(0.0))
    return Ran("d" * 128, "m" * 128, 1.0, 1.0, 0.0, 0, 0, 0.9, ledger, tuple(action for _ in range(MAX_ACTIONS)))


@pytest.mark.parametrize("char", ["x", "\0", "\u00e9", "\U0001f600"])
@pytest.mark.parametrize("nodes", [2, 2000])
def test_the_largest_of_everything_fits_and_says_what_was_left_out(char: str, nodes: int) -> None:
    made = for_record(ran(nodes, char * MAX_NAME, b"1" * MAX_KEPT_BODY, 120, char * 2000, planes=64))
    assert len(json.dumps(made)) <= MAX_RECORD_BYTES
    assert made["verdict"] == "diverged" and made["beyond"] == 120 * ROWS
    assert made["cut"]["kept"] + len(made["kept"]) == 100 and made["cut"]["bodies"]


def test_of_common_questions_the_newest_samples_stay_and_their_bodies_go_first() -> None:
    whole = ran(4, "n", b"1" * 7000, 12, "done")
    made = for_record(whole)
    assert [sample["at_ms"] for sample in made["kept"]] == list(range(2, 12)), "all that a record takes"
    assert made["kept"][-1]["body"] and not made["kept"][0]["body"]
    assert made["cut"] == {"bodies": sum(not sample["body"] for sample in made["kept"]), "kept": 2, "rows": MAX_RECORDED * (ROWS - 64)}
    assert len(made["actions"]) == MAX_ACTIONS and made["unanswered"] and made["not_compared"]
    assert len(as_json(whole)["kept"]) == 12 and "cut" not in as_json(whole) and "and 7 more" in as_text(whole)


def test_what_fits_is_whole() -> None:
    made = for_record(ran(2, "n", b"{}", 1, "done"))
    assert set(made["cut"]) == {"rows"} and made["kept"][0]["order"]["order_revision"] == 2


def test_why_nothing_was_answered_stands_beside_how_much_that_was() -> None:
    ledger = Ledger({"primary": ["p"], "standby": ["s"]})
    question = Question("q", b"{}", 1, "close")
    silent = Heard("p", "", {}, None, "refused: the node answered with status 403: x has role reader")
    for at in range(3):
        ledger.add(question, silent, silent._replace(node="s"), judge(question, silent, silent, ()), Moment(at))
    made = Ran("d", "m", 1.0, 1.0, 0.0, 0, 0, 0.9, ledger, (), "p: status 403")
    text = as_text(made)
    assert "unanswered   p: 3; the first time: refused: the node answered with status 403: x has role reader\n" in text
    assert "ended early  p: status 403\n" in text and "INCOMPLETE" in text
    assert "unanswered_because" in as_json(made) and "refused" not in for_record(made)
