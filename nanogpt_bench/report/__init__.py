"""From run folders to a page, pictures and tables."""

from nanogpt_bench.report.build import main_report, report, write_report
from nanogpt_bench.report.verdict import Thresholds

__all__ = ["Thresholds", "main_report", "report", "write_report"]
