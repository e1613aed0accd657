"""From run folders to a page, pictures and tables."""

from nanogpt_bench.report.build import main_report, report, write_report

__all__ = ["main_report", "report", "write_report"]
