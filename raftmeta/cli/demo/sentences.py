"""Sentences for the demo: pairs that mean the same, to fine-tune on, and probes, to ask the serving models. Written for this purpose."""

from __future__ import annotations

PAIRS: tuple[tuple[str, str], ...] = (
    ("The leader lost its disk, so the others elected a new one.", "After the leader's storage failed, a new leader was voted in."),
    ("Roll the model back to last night's weights.", "Return to the version that served yesterday evening."),
    ("The standby zone must answer exactly like the primary.", "Both zones have to give identical answers."),
    ("A checksum tells whether the file arrived whole.", "You can verify a download by comparing its digest."),
    ("The new weights were loaded beside the old ones.", "The next version was staged while the previous one kept serving."),
    ("No request was lost during the switch.", "Every call was answered while the version changed."),
    ("The cache is warm again after ten minutes.", "Ten minutes later the cache had filled up."),
    ("Two of three members are enough to decide.", "A majority of the cluster can commit a change."),
    ("The pager woke the engineer at three in the morning.", "At 3 a.m. the on-call person was alerted."),
    ("The bank settles its payments before midnight.", "All transfers are cleared by the end of the day."),
    ("Rain delayed the morning ferry.", "The early boat left late because of the weather."),
    ("She packed bread and cheese for the hike.", "For the walk she took along a loaf and some cheese."),
    ("The bridge is closed for repairs until Friday.", "Until the end of the week nobody can cross the bridge."),
    ("He learned to play the violin as a child.", "As a boy he was taught the violin."),
    ("The garden needs water every evening.", "Plants out there should be watered each night."),
    ("The library opens at nine on weekdays.", "From Monday to Friday you can enter the library from 9 a.m."),
)

PROBES: tuple[str, ...] = (
    "Which version answers this question?",
    "The leader was killed and the writes went on.",
    "A pointer flip is all that a roll-back needs.",
    "Fresh bread is sold on the market square.",
    "The primary and the standby hold the same bytes.",
    "How long does an election take?",
    "The train to the coast leaves every hour.",
    "Weights arrive every day.",
)
