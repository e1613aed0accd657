"""How much of the loss of nearest rounding each rule avoids, in a format.

Nearest rounding costs L_nearest - L_fp32. A rule brings back the share

    (L_nearest - L_rule) / (L_nearest - L_fp32)

of that, which is computed seed by seed.
"""

from _markdown import markdown
from _paired import losses_of
from _weights import data_of, label_without_data, text_name

from nanogpt_bench.report.paired import Difference, difference
from nanogpt_bench.report.results_file import Exported
from nanogpt_bench.report.rows import Row


def recovered_table(file: Exported) -> str:
    """Return a line per rule and format, and a column per text.

    Returns "" if the file lacks `nearest` or `fp32`.
    """
    fp32 = {data_of(row): row for row in file.rows if row.rule == "fp32"}
    nearest = {(row.format, data_of(row)): row for row in file.rows if row.rule == "nearest"}
    cells: dict[str, dict[str, str]] = {}
    for row in file.rows:
        data = data_of(row)
        if row.rule == "nearest" or (row.format, data) not in nearest or data not in fp32:
            continue
        share = recovered_share(row, nearest[row.format, data], fp32[data])
        cells.setdefault(label_without_data(row), {})[data] = share_text(share)
    if not cells:
        return ""
    header = ["rule", *(f"brought back, {text_name(data)}" for data in fp32)]
    lines = []
    for label, cell_by_data in cells.items():
        lines.append([f"`{label}`", *(cell_by_data.get(data, "-") for data in fp32)])
    return markdown(header, lines)


def recovered_share(row: Row, nearest: Row, fp32: Row) -> Difference | None:
    """Return the mean share over the seeds that all three rows have, with its interval."""
    of_rule = losses_of(row)
    of_nearest = losses_of(nearest)
    of_fp32 = losses_of(fp32)
    shares = {}
    for seed in of_rule.keys() & of_nearest.keys() & of_fp32.keys():
        cost = of_nearest[seed] - of_fp32[seed]
        shares[seed] = (of_nearest[seed] - of_rule[seed]) / cost
    return difference(shares, dict.fromkeys(shares, 0.0))


def share_text(share: Difference | None) -> str:
    """Return a share with its interval in percent.

    >>> share_text(Difference(0.5, 3, 0.25, 0.75)), share_text(Difference(1.1, 1))
    ('50% [25%, 75%]', '110%, one seed: a hint')
    >>> share_text(None)
    '-'
    """
    if share is None:
        return "-"
    if share.low is None or share.high is None:
        return f"{share.mean:.0%}, one seed: a hint"
    return f"{share.mean:.0%} [{share.low:.0%}, {share.high:.0%}]"
