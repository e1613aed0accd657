"""Fixtures for run folders on disk; see run_folders.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the tests to find run_folders.py and chromium.py

import run_folders


@pytest.fixture(scope="session")
def write_run() -> Callable[..., Any]:
    return run_folders.write_run


@pytest.fixture(scope="session")
def write_comparison() -> Callable[..., Any]:
    return run_folders.write_comparison


@pytest.fixture(scope="session")
def write_metrics() -> Callable[..., Any]:
    return run_folders.write_metrics


@pytest.fixture(scope="session")
def write_alerts() -> Callable[..., Any]:
    return run_folders.write_alerts


@pytest.fixture(scope="session")
def write_distributions() -> Callable[..., Any]:
    return run_folders.write_distributions
