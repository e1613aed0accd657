"""The order of events and the lead time of the kurtosis alert."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from nanogpt_bench.failures import diagnose

Make = Callable[..., Path]
KURTOSIS = {"step": 40, "level": "WARN", "kind": "kurtosis", "message": "kurtosis 14", "value": 14.0, "threshold": 10.0}


def test_criteria_alerts_and_end_come_in_the_order_of_steps(make: Make) -> None:
    stalled = {"stall/update_lost": dict.fromkeys(range(20, 61, 10), 0.9)}
    alerts = [KURTOSIS, {**KURTOSIS, "step": 60}]
    failure = {"kind": "nan", "message": "train/loss is nan at step 61", "step": 61}
    summary = {"status": "failed", "failure": failure}
    diagnosis = diagnose(make(loss=[3.0] * 60 + [None], series=stalled, alerts=alerts, summary=summary))
    events = [(event.step, event.source, event.kind) for event in diagnosis.timeline]
    assert events == [
        (1, "criterion", "plateau"),
        (20, "criterion", "stall"),
        (40, "alert", "kurtosis"),
        (61, "criterion", "nan"),
        (61, "end", "failed"),
    ]
    assert diagnosis.timeline[-1].text == failure["message"]
    assert [finding.kind for finding in diagnosis.found] == ["plateau", "stall", "nan"]
    json.dumps(asdict(diagnosis), allow_nan=False)


def test_the_lead_time_runs_from_the_first_kurtosis_alert_to_the_first_sign_of_failure(make: Make) -> None:
    path = make(loss=[3.0] * 60 + [None], alerts=[KURTOSIS], summary={"status": "failed"})
    lead = diagnose(path).lead_time
    assert lead is not None
    assert (lead.alert_step, lead.failure_step, lead.failure_kind, lead.steps) == (40, 61, "nan", 21)
    assert lead.seconds == 10.5


def test_an_alert_that_came_too_late_has_a_negative_lead(make: Make) -> None:
    path = make(loss=[3.0] * 30 + [None] * 20, alerts=[KURTOSIS])
    lead = diagnose(path).lead_time
    assert lead is not None
    assert lead.steps == -9


def test_the_blocks_outputs_tell_before_an_alert_about_something_else(make: Make) -> None:
    series = {"quant/kurtosis/residual": {20: 3.0, 40: 9.0, 50: 11.0, 60: 30.0}}
    lead = diagnose(make(loss=[3.0] * 60 + [None], series=series, alerts=[KURTOSIS])).lead_time
    assert lead is not None
    assert (lead.alert_step, lead.steps) == (50, 11)
    strict = make("strict", loss=[3.0] * 60 + [None], series=series, settings={"alerts": {"kurtosis": 8.0}})
    lead = diagnose(strict).lead_time
    assert lead is not None
    assert lead.alert_step == 40


def test_without_alert_or_without_failure_there_is_no_lead_time(make: Make) -> None:
    assert diagnose(make(loss=[3.0] * 30 + [None])).lead_time is None
    assert diagnose(make("well", alerts=[KURTOSIS])).lead_time is None
