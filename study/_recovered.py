"""The share of nearest rounding's loss against float32, in a format, that each rule
avoids.
"""

from _markdown import markdown
from _paired import losses_of
from _weights import data_of

from nanogpt_bench.report.paired import Difference, difference
from nanogpt_bench.report.results_file import Exported
from nanogpt_bench.report.rows import Row


def recovered(file: Exported) -> str:
    """A line per rule and format, a column per text; "" if the file lacks `nearest` or
    `fp32`.

    The share is (L_nearest - L_rule) / (L_nearest - L_fp32), for each seed.
    """
    fp32 = {data_of(row): row for row in file.rows if row.rule == "fp32"}
    nearest = {(row.format, data_of(row)): row for row in file.rows if row.rule == "nearest"}
    shares: dict[str, dict[str, str]] = {}
    for row in file.rows:
        data = data_of(row)
        if row.rule != "nearest" and (row.format, data) in nearest and data in fp32:
            found = share(row, nearest[row.format, data], fp32[data])
            shares.setdefault(row.label.replace(f" dir={data}", ""), {})[data] = in_share(found)
    header = ["rule", *(f"brought back, {data.split('/')[-1]}" for data in fp32)]
    rows = [
        [f"`{label}`", *(each.get(data, "-") for data in fp32)] for label, each in shares.items()
    ]
    return markdown(header, rows) if rows else ""


def share(row: Row, nearest: Row, fp32: Row) -> Difference | None:
    """The mean share over the seeds that all three rows have, with its interval."""
    own, lost, exact = map(losses_of, (row, nearest, fp32))
    shares = {
        seed: (lost[seed] - own[seed]) / (lost[seed] - exact[seed])
        for seed in own.keys() & lost.keys() & exact.keys()
    }
    return difference(shares, dict.fromkeys(shares, 0.0))


def in_share(found: Difference | None) -> str:
    """A share with its interval, as text.

    >>> in_share(Difference(0.5, 3, 0.25, 0.75)), in_share(Difference(1.1, 1)), in_share(None)
    ('50% [25%, 75%]', '110%, one seed: a lead', '-')
    """
    if found is None:
        return "-"
    if found.low is None or found.high is None:
        return f"{found.mean:.0%}, one seed: a lead"
    return f"{found.mean:.0%} [{found.low:.0%}, {found.high:.0%}]"
