"""The audit hook of the suite works: a test that could not fail would guard nothing."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict

import pytest

from tests.support.no_pickle import PickleRead


def test_reading_a_pickle_that_names_a_class_fails_in_the_whole_suite() -> None:
    written = pickle.dumps(OrderedDict(a=1))
    with pytest.raises(PickleRead, match="OrderedDict"):
        pickle.loads(written)  # noqa: S301 - this is what must fail


def test_the_python_implementation_of_pickle_is_watched_too() -> None:
    written = io.BytesIO(pickle.dumps(OrderedDict(a=1)))
    with pytest.raises(PickleRead, match="OrderedDict"):
        pickle._Unpickler(written).load()
