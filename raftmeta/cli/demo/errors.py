"""What can stop the demo before it has figures."""

from __future__ import annotations


class DemoError(Exception):
    """A step did not work; `log` is the tail of the process that shows why, "" when there is none."""

    def __init__(self, what: str, log: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.log = log
