"""References: a task made of the text of laws, which other articles a paragraph refers to, their numbers masked.

A document is a paragraph of an article that refers to an article of its own act by number, as in `Article 6(1) and (2)`
or `Articles 13 to 15`. Its labels are the numbers of the articles. All numbers of references, those to articles of
other acts as well, are replaced by `MASK`, so that a label has to be told from what the paragraph says.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from nanogpt_bench.data.write import LabelledText
from nanogpt_bench.system.errors import BenchError

#: what stands for the numbers of a reference
MASK = "#"
#: every fourth document is for validation: there are few in the text of one act
VAL_EVERY = 4
#: training documents that have to refer to an article, for its number to be a label
LEAST = 5
#: articles of one range
MOST_IN_RANGE = 200

_PART = r"\((?:\d{1,2}|[a-z]{1,4})\)"
_ONE = rf"\d+[a-z]?(?:{_PART})*(?!\w)"
_REFERENCE = re.compile(
    rf"\b(?P<word>Articles?)\s+(?P<numbers>{_ONE}(?:(?:,\s*|,?\s+(?:and|or|to)\s+)(?:{_PART}|{_ONE}))*)"
    r"(?P<elsewhere>\s+of\s+(?!this\b)|\s+TF?EU\b)?"
)
#: a number that is an article's, and no paragraph's of one in brackets; a range goes to its second
_ARTICLE = re.compile(r"(?P<to>\bto\s+)?(?<![(\w])(?P<number>\d+)")
_PARAGRAPH = re.compile(r"(?<=[.;:])\s+(?=\d{1,2}\.\s+[A-Z(])|\n+")


def paragraphs(text: str) -> list[str]:
    """Return the numbered paragraphs of an article, or its lines.

    >>> paragraphs("Scope 1. This is so. 2. That is not.")
    ['Scope 1. This is so.', '2. That is not.']
    """
    return [part.strip() for part in _PARAGRAPH.split(text) if part.strip()]


def masked(text: str) -> tuple[str, set[int]]:
    """Return a text with the numbers of its references masked, and those of articles of its own act.

    >>> masked("Under Articles 13 to 15 and Article 6(1) of Regulation (EU) 2016/679, but not Article 9.")[0]
    'Under Articles # and Article # of Regulation (EU) 2016/679, but not Article #.'
    >>> sorted(masked("Under Articles 13 to 15 and Article 6(1) of Regulation (EU) 2016/679, but not Article 9.")[1])
    [9, 13, 14, 15]
    """
    found: set[int] = set()

    def mask(reference: re.Match[str]) -> str:
        if not reference["elsewhere"]:
            found.update(_articles(reference["numbers"]))
        return f"{reference['word']} {MASK}{reference['elsewhere'] or ''}"

    return _REFERENCE.sub(mask, text), found


def _articles(numbers: str) -> Iterator[int]:
    before = 0
    for each in _ARTICLE.finditer(numbers):
        number = int(each["number"][:9])
        yield number
        if each["to"] and before < number < before + MOST_IN_RANGE:
            yield from range(before + 1, number)
        before = number


def reference_documents(texts: Iterable[str]) -> tuple[dict[str, list[LabelledText]], list[str]]:
    """Return the documents of both splits, every fourth being for validation, and the names of their labels.

    A label is an article to which at least `LEAST` documents for training refer; a document without one is left out.

    Raises:
        BenchError: fewer than two such articles.
    """
    found = [part for text in texts for part in map(masked, paragraphs(text)) if part[1]]
    training = [articles for place, (_, articles) in enumerate(found) if not _held_out(place)]
    counts = Counter(number for articles in training for number in articles)
    kept = sorted(number for number, count in counts.items() if count >= LEAST)
    if len(kept) < 2:
        raise BenchError(
            f"the text has {len(kept)} articles to which {LEAST} paragraphs refer by number; at least 2 are needed to "
            "tell apart"
        )
    order = {number: place for place, number in enumerate(kept)}
    splits: dict[str, list[LabelledText]] = {"train": [], "val": []}
    for place, (text, articles) in enumerate(found):
        if labels := sorted(order[number] for number in articles if number in order):
            splits["val" if _held_out(place) else "train"].append(LabelledText(text, labels))
    return splits, [f"Article {number}" for number in kept]


def _held_out(place: int) -> bool:
    return place % VAL_EVERY == VAL_EVERY - 1
