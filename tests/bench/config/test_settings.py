"""Configuration files, overrides, rules and comparisons' settings.

What is read, resolved and refused.
"""

from pathlib import Path

import gpt2_checkpoints
import pytest
from bench_runs import refusal, resolved

from nanogpt_bench.cli import main
from nanogpt_bench.config.keys import FIELDS, get
from nanogpt_bench.config.rules import RULES, available_rules
from nanogpt_bench.config.schema import MANIFOLDS, OWN_OPTIMIZERS, ROUNDED, WITHOUT_FORMATS, Config
from nanogpt_bench.config.settings import (
    CONFIGS_FOLDER,
    build_config,
    defaults_yaml,
    find_config,
    load_config,
    parse_overrides,
    shipped_configs,
    to_yaml,
)
from nanogpt_bench.setup.resolve import resolve, rule_name
from nanogpt_bench.sweep import session as command
from nanogpt_bench.sweep.file import read_sweep

STOP = "train: {stop_on: [nan, plateau]}"
#: sections that a run of an earlier version wrote, and the like that ask for what is gone:
#: the first have values that change nothing today
OF_A_RUN = [
    ("{seed: 7, data: {seed: 7}, model: {seed: 7}}", "{seed: 7, data: {seed: 8}}"),
    ("{task: classify, model: {pooling: mean}}", "{task: classify, model: {pooling: last}}"),
    (
        "{rule: fisher, optimizer: {damping: 0.1, eps: 1.0e-8}}",
        "{rule: riemannian, optimizer: {damping: 0.1}}",
    ),
    (
        "{rule: riemannian, optimizer: {damping: 0.00390625}}",
        "{rule: fisher, optimizer: {damping: 0.00390625}}",
    ),
    ("{model: {constrained: [attn.qkv, attn.proj]}}", "{model: {constrained: [attn]}}"),
]
#: a file, the words beside it, and settings that come of them
READ_VALUES = [
    ("seed: 3\ntrain: {max_steps: 10}", "--train.max_steps 20", {"seed": 3, "train.max_steps": 20}),
    (
        "optimizer: {lr: 1e-2}",
        "--model.format=E5M2",
        {"optimizer.lr": 0.01, "model.format": "E5M2"},
    ),
    (STOP, "", {"train.stop_on": ["nan", "plateau"]}),
    (STOP, "--train.stop_on divergence,nan", {"train.stop_on": ["divergence", "nan"]}),
    (STOP, "--train.stop_on=[]", {"train.stop_on": []}),
    (
        "tracking: {wandb: off, tensorboard: off}",
        "",
        {"tracking.wandb": "off", "tracking.tensorboard": False},
    ),
    *(
        (
            f'optimizer: {{name: "{null}", lr: "{null}"}}',
            "",
            dict.fromkeys(("optimizer.name", "optimizer.lr")),
        )
        for null in ("null", "~")
    ),
    *(
        ("{}", f"--optimizer.name {name}", {"optimizer.name": "stiffness_adamw"})
        for name in ("StiffnessAdamW", "stiffness-adamw", "stiffness_adamw")
    ),
    ("{}", "", dict.fromkeys(("model.format", "optimizer.lr"))),
    # sections and settings of earlier files, where they ask for what was done by
    # default
    (
        "alerts: {enabled: false, levels: {}}\nfailure: {patience: 3, stall: 0.5}",
        "",
        {"alerts.enabled": False},
    ),
    (
        "model: {outliers: none, lora_rank: null}\ntrain: {max_rollbacks: 3, max_steps: 7}",
        "",
        {"train.max_steps": 7},
    ),
    *((filled, "", {}) for filled, _ in OF_A_RUN),
]
#: what is said of a file, its parts apart by " & "
REFUSED = {
    "train: 3\n": "train & 3 & section",
    "train:\n  max_step: 3\n": "train.max_step & train.max_steps",
    "trian:\n  max_steps: 3\n": "trian",
    "- 1\n- 2\n": "keys and values",
    "a: [1\n": "not valid YAML",
    "seed: !!python/object/apply:os.getcwd []\n": "not valid YAML",
    **dict.fromkeys(("", "# nothing\n", "\ufeff"), "is empty; give settings"),
    "failure: {patience: 4}\n": "failure.patience: 4 is no longer supported; leave",
    "model: {outliers: clip_sigma}\n": "model.outliers: 'clip_sigma' is no longer supported; leave "
    "model",
    **{old_key: "is no longer supported" for _, old_key in OF_A_RUN},
}


@pytest.mark.parametrize(("text", "words", "expected"), READ_VALUES)
def test_a_file_and_the_words_beside_it_are_read(tmp_path, text, words, expected):
    (tmp_path / "a.yaml").write_text(text)
    config = load_config(tmp_path / "a.yaml", words.split())
    assert {key: get(config, key) for key in expected} == expected
    assert text != "{}" or words or config == Config()


@pytest.mark.parametrize(("text", "message"), REFUSED.items())
def test_wrong_files_are_refused_in_one_line(tmp_path, text, message):
    (tmp_path / "bad.yaml").write_text(text, encoding="utf-8")
    with refusal() as caught:
        load_config(tmp_path / "bad.yaml")
    assert [part for part in message.split(" & ") if part not in str(caught.value)] == []


def test_the_file_of_all_defaults_is_read_as_none_at_all_and_explains_every_setting(tmp_path):
    path = tmp_path / "defaults.yaml"
    path.write_text(defaults_yaml())
    assert load_config(path) == build_config({}) == Config()
    lines = path.read_text().splitlines()
    settings = [
        place
        for place, line in enumerate(lines)
        if not line.lstrip().startswith("#") and line.partition(":")[2]
    ]
    assert len(settings) == len(FIELDS)
    assert all(lines[place - 1].lstrip().startswith("#") for place in settings)


def test_a_small_version_changes_one_setting_of_a_section_and_leaves_the_others(tmp_path):
    text = "settings: {train: {max_steps: 300, batch_size: 4}}\naxes: {seed: [1]}\n"
    (tmp_path / "mine.yaml").write_text(text + "smoke: {settings: {train: {max_steps: 2}}}")
    small = read_sweep(tmp_path / "mine.yaml", smoke=True).base
    assert (small["train.max_steps"], small["train.batch_size"]) == (2, 4)


ATTENTION = ["--model.formats.attn", "E4M3"]
WHOLE = ["--model.formats", "{attn: E4M3}"]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(ATTENTION + ATTENTION, id="key twice"),
        pytest.param(WHOLE + ATTENTION, id="mapping then key"),
        pytest.param(ATTENTION + WHOLE, id="key then mapping"),
        pytest.param(["--model.formats", "{attn: E4M3, attn: E5M2}"], id="twice in a mapping"),
    ],
)
def test_an_entry_is_given_once(words):
    with refusal("given twice"):
        parse_overrides(words)


def test_an_entry_does_not_drop_the_others_whatever_the_order():
    mlp = ["--model.formats.mlp=E5M2"]
    merged = {"model.formats": {"attn": "E4M3", "mlp": "E5M2"}}
    assert parse_overrides(WHOLE + mlp) == parse_overrides(mlp + WHOLE) == merged


@pytest.mark.parametrize("name", shipped_configs())
def test_every_shipped_file_is_valid(name, tmp_path):
    config = load_config(find_config(name))
    if config.rule and config.rule not in available_rules():
        pytest.skip(f"{config.rule} needs a package that is not installed")
    if config.model.init_from:
        config.model.init_from = str(gpt2_checkpoints.write(tmp_path))
    assert resolve(config).train.max_steps == (763 if name == "gpt2_124m.yaml" else 2000)


@pytest.mark.usefixtures("working_folder")
@pytest.mark.parametrize("name", ["e4m3", "e4m3.yaml", "configs/e4m3.yaml"])
def test_a_shipped_file_is_found_by_its_name(name):
    assert find_config(name) == CONFIGS_FOLDER / "e4m3.yaml"


@pytest.mark.usefixtures("working_folder")
@pytest.mark.parametrize("name", ["e4m33.yaml", "elsewhere/e4m3.yaml"])
def test_a_missing_file_is_answered_with_the_nearest(name):
    with refusal(r"does not exist; did you mean 'e4m3.yaml'\?"):
        find_config(name)


def test_a_file_on_disk_is_found_before_a_shipped_one(working_folder):
    (working_folder / "e4m3.yaml").write_text("seed: 1\n")
    assert load_config(find_config("e4m3.yaml")).seed == 1


def test_a_name_without_its_ending_means_one_file_or_none(working_folder):
    (working_folder / "small.yaml").write_text("seed: 1\n")
    assert find_config("small") == Path("small.yaml")
    (working_folder / "e4m3.yaml").write_text("seed: 1\n")
    with refusal("config 'e4m3' could mean 'e4m3.yaml' here or the shipped '.*configs/e4m3.yaml'"):
        find_config("e4m3")
    assert find_config("e4m3.yaml") == Path("e4m3.yaml")
    assert (
        find_config("configs/e4m3.yaml")
        == find_config("configs/e4m3")
        == CONFIGS_FOLDER / "e4m3.yaml"
    )


@pytest.mark.parametrize("key", ["data.dir", "eval.also"])
@pytest.mark.parametrize("spelling", ["./data/x", "data/x/", "data//x", "data/./x"])
def test_a_folder_has_one_spelling(key, spelling):
    assert parse(key, spelling) == "data/x"
    assert parse(key, "../data/x") == "../data/x"
    assert parse(key, "/data/x/") == "/data/x"


def parse(key, text):
    """The value of a setting that was given on the command line."""
    return get(load_config(None, [f"--{key}", text]), key)


@pytest.mark.parametrize("rule", available_rules())
def test_a_rule_fills_in_what_it_stands_for_and_its_configuration_resolves_to_itself(
    rule, tmp_path
):
    words = [
        "--rule",
        rule,
        *([] if RULES[rule].storage in WITHOUT_FORMATS else ["--model.format", "E4M3"]),
    ]
    config = resolved(words)
    entry, optimizer = RULES[rule], config.optimizer
    assert (config.model.storage, config.train.precision) == (entry.storage, entry.precision)
    assert (optimizer.name, optimizer.lr, optimizer.writeback) == (
        entry.optimizer,
        entry.lr,
        entry.writeback,
    )
    assert optimizer.moments == (
        entry.moments or ("float32" if entry.storage in MANIFOLDS else None)
    )
    assert (optimizer.stiffness, optimizer.stiffness_end) == (entry.stiffness, entry.stiffness_end)
    config.rule = None
    assert rule_name(config) == rule
    once, path = resolved(words), tmp_path / "config.yaml"
    path.write_text(to_yaml(once))
    again = resolve(load_config(path))
    assert again == once
    assert again.layers == once.layers
    with pytest.raises(TypeError, match="is resolved already"):
        resolve(once)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("--optimizer.name StiffnessAdamW --optimizer.stiffness=2", "custom"),
        ("--rule stiffness --model.storage grid", "stiffness"),
    ],
)
def test_one_byte_that_is_simulated_in_floats_has_its_rule_s_name_and_other_settings_are_custom(
    words, name
):
    config = resolved(["--model.format", "E4M3", *words.split()])
    config.rule = None
    assert rule_name(config) == name


@pytest.mark.parametrize("name", OWN_OPTIMIZERS)
def test_an_optimizer_alone_calls_for_a_grid_and_has_defaults(name):
    spellings = ["--monitor.activation_format=e4m3", "--monitor.gradient_format=none"]
    config = resolved(["--model.format", "E4M3", "--optimizer.name", name, *spellings])
    optimizer, monitor = config.optimizer, config.monitor
    assert (monitor.activation_format, monitor.gradient_format) == ("E4M3", None)
    assert config.model.storage in ROUNDED
    assert (optimizer.writeback, optimizer.moments) == ("stochastic", "float32")
    assert optimizer.lr is not None
    assert (optimizer.stiffness is not None) is name.startswith(("stiffness", "fisher"))
    assert (optimizer.momentum is not None) is name.endswith(("sgd", "fisher", "muon", "adafactor"))


ROWS = ["compare", "--formats", "E4M3", "--rules", "sgd,stochastic", "--out", "out"]


@pytest.fixture
def planned(monkeypatch, working_folder):
    """Return a function that plans a command line.

    It returns the records of what would have been trained, by label.
    """
    records = []

    def train(session, planned):
        records.append(planned)
        for run in planned:
            session._record.add(run)
        session._record.write_manifest()
        return True

    monkeypatch.setattr(command.Session, "train", train)
    monkeypatch.setattr(command, "close", lambda *_, **__: 0)

    def plan(*words):
        assert main([*ROWS, *words]) == 0
        return {run.label: run for run in records[-1]}

    return plan


def test_settings_go_into_every_row_that_takes_them(planned, capsys):
    words = (
        "--model.n_layer=2",
        "--optimizer.lr",
        "3e-3",
        "--optimizer.weight_decay=0",
        "--optimizer.momentum",
        "0.5",
    )
    rows = planned(
        *words, "--model.formats.lm_head", "none", "--train.max_steps", "40", "--seed", "7"
    )
    configs = {label: resolve(build_config(run.settings)) for label, run in rows.items()}
    assert list(configs) == ["bf16-mixed", "sgd", "E4M3 stochastic"]
    for label, config in configs.items():
        assert (config.model.n_layer, config.optimizer.lr, config.optimizer.weight_decay) == (
            2,
            3e-3,
            0.0,
        ), label
        assert (config.train.max_steps, config.optimizer.warmup_steps, config.eval.interval) == (
            40,
            4,
            4,
        ), label
        assert (config.seed, config.optimizer.momentum) == (7, 0.5 if label == "sgd" else None), (
            label
        )
    assert configs["E4M3 stochastic"].model.formats == {"lm_head": "none", "*": "E4M3"}
    assert capsys.readouterr().err.splitlines()[:3] == [
        "optimizer.lr 0.003 in every row, in the unit of the row's optimizer, instead of its rule's own",
        "optimizer.momentum 0.5 in the rows that take it: sgd",
        "model.formats {'lm_head': 'none'} in the rows that take it: E4M3 stochastic",
    ]


def test_without_settings_every_row_has_its_rule_s_rate_and_what_differs_later_is_named(
    planned, refused
):
    rates = {
        run.rule: resolve(build_config(run.settings)).optimizer.lr for run in planned().values()
    }
    assert rates == {rule: RULES[rule].lr for rule in ("bf16-mixed", "sgd", "stochastic")}
    refused(*ROWS, "--optimizer.lr", "0.1")
    assert "with eval.batches 20, but now it would be 3; give a new folder" in refused(
        *ROWS, "--eval.batches", "3"
    )
