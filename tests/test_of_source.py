"""The map from a source file to its tests has every source, and every test of the two packages."""

import pytest
from of_source import FOLDERS, ROOT, where_tested

SOURCES = [path for package in ("fp8manifold", "nanogpt_bench") for path in sorted((ROOT / package).rglob("*.py"))]


def test_every_source_has_tests() -> None:
    for source in SOURCES:
        itself, *tests = where_tested(source.relative_to(ROOT).as_posix())
        assert ROOT / itself == source
        assert tests, source
        assert [test for test in tests if not (ROOT / test).exists()] == [], source


def test_every_test_is_that_of_a_source() -> None:
    places = [ROOT / place for places in FOLDERS.values() for place in places.split()]
    assert [place for place in places if not place.exists()] == []
    of_packages = [path for folder in ("library", "bench") for path in (ROOT / "tests" / folder).rglob("test_*.py")]
    assert [path.name for path in of_packages if not {path, *path.parents} & {*places}] == ["test_missing_packages.py"]


@pytest.mark.parametrize("source", ["fp8manifold/optim/_slots.py", "LICENSE", "slot"])
def test_what_is_no_source_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match=f"^source: '{source}'; allowed: a file below benchmarks/, "):
        where_tested(source)
