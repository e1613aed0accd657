"""Finding configuration files."""

from pathlib import Path

import gpt2_checkpoints
import pytest
from laws import each

from nanogpt_bench.config.rules import available_rules
from nanogpt_bench.config.settings import FOLDER, find_config, load_config, shipped_configs
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.system.errors import BenchError


@each("name", shipped_configs())
def test_every_shipped_file_is_valid(name: str, tmp_path: Path) -> None:
    config = load_config(find_config(name))
    if config.rule and config.rule not in available_rules():
        pytest.skip(f"{config.rule} needs a package that is not installed")
    if config.model.init_from:
        config.model.init_from = str(gpt2_checkpoints.write(tmp_path))
    assert resolve(config).train.max_steps == (763 if name == "gpt2_124m.yaml" else 2000)


@each("name", ["e4m3", "e4m3.yaml", "configs/e4m3.yaml"])
def test_a_shipped_file_is_found_by_its_name(name: str) -> None:
    assert find_config(name) == FOLDER / "e4m3.yaml"


def test_a_file_on_disk_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("e4m3.yaml").write_text("seed: 1\n")
    assert load_config(find_config("e4m3.yaml")).seed == 1


@each("name", ["e4m33.yaml", "elsewhere/e4m3.yaml"])
def test_a_missing_file_is_named_with_the_nearest_shipped_one(name: str) -> None:
    with pytest.raises(BenchError, match=r"does not exist; did you mean 'e4m3.yaml'\?"):
        find_config(name)
