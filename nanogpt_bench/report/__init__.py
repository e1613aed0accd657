"""From run folders to a page, pictures and tables."""

from nanogpt_bench.report.build import check_folder, report, write_report

__all__ = ["check_folder", "report", "write_report"]
