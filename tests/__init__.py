"""Tests; conftest.py and support/ hold what they share."""

import pytest

# A failed assertion of a shared helper shows its values, as one of a test does.
pytest.register_assert_rewrite("tests.support", "tests.hostile.case")
