"""Fixtures for run folders on disk; see run_folders.py."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the tests to find run_folders.py and chromium.py

import run_folders as made


def _given(function: Callable[..., Any]) -> Any:
    """A fixture that is the function."""
    return pytest.fixture(scope="session", name=function.__name__)(lambda: function)


write_run, write_comparison = _given(made.write_run), _given(made.write_comparison)
write_metrics, write_alerts = _given(made.write_metrics), _given(made.write_alerts)
