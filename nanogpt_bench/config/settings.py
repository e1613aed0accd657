"""Reading YAML files and overrides into a checked `Config`, and writing one.

A file and the overrides become one {dotted key: value} mapping, from which
`build_config` makes the `Config`. A key that does not exist is refused here with its
nearest valid spelling. `config.field` checks values.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import yaml
from pydantic import Field, ValidationError

from nanogpt_bench.config.conflicts import refuse_new_meanings
from nanogpt_bench.config.field import NULLS, SettingsSection, kind_of, parse_text
from nanogpt_bench.config.keys import FIELDS, SECTIONS, mapping_above, refusal
from nanogpt_bench.config.metrics import WATCHED
from nanogpt_bench.config.renamed import RENAMED, current_value
from nanogpt_bench.config.rules import RULES, optimizer_of
from nanogpt_bench.config.schema import Config, OptimizerName
from nanogpt_bench.system import untrusted
from nanogpt_bench.system.errors import BenchError, nearest, refusals, unknown


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of a YAML file with command-line overrides, checked.

    Without a file all settings have their defaults.

    >>> load_config(None, ["--train.max_steps", "7"]).train.max_steps
    7
    """
    file = read_settings_file(path) if path else {}
    merged = parse_overrides(overrides, file)
    config = build_config(merged)
    if overrides:
        refuse_new_meanings(file, merged, parse_overrides(overrides))
    return config


def read_settings_file(path: Path) -> dict[str, Any]:
    """Return the settings of a YAML file as {dotted key: value}, its keys checked."""
    loaded = content_of(path, "config")
    if loaded is None:
        raise BenchError(
            f"config {str(path)!r} is empty; give settings, such as rule: fp32, or {{}} for all "
            f"defaults"
        )
    if not isinstance(loaded, dict):
        raise BenchError(
            f"config {str(path)!r} must hold keys and values, not {type(loaded).__name__}"
        )
    try:
        return once(flatten(loaded))
    except DuplicateSetting as error:
        raise error.in_file(path) from None


def content_of(path: Path, kind: str) -> Any:
    """Return the content of a YAML file; `kind` is what an error calls the file."""
    with refusals(f"{kind} {str(path)!r} is not valid YAML", ValueError):
        try:
            return untrusted.read_yaml(path)
        except OSError as error:
            raise BenchError(
                f"{kind} {str(path)!r} can't be read: {error.strerror or error}"
            ) from None


class DuplicateSetting(BenchError):
    """The error of a setting given twice, for example dotted and nested."""

    def __init__(self, key: str) -> None:
        """Take the dotted key, which in a sweep file begins with its section."""
        super().__init__(f"{key} is given twice; keep one")
        self.key = key

    def in_file(self, path: Path) -> BenchError:
        """The same error with the file's name."""
        return BenchError(f"{self.key} is given twice in {path.name!r}; keep one")


def once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return pairs as a mapping, and refuse a key that comes twice.

    >>> once([("seed", 1), ("rule", "fp32")])
    {'seed': 1, 'rule': 'fp32'}
    """
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise DuplicateSetting(key)
        mapping[key] = value
    return mapping


#: settings that only earlier versions had, with their defaults: a file may still give
#: them with these values. In YAML, since files of those versions give them so
_GONE_YAML = """
alerts: {at_least: {}, at_most: {}, attention_entropy: 0.1, cooldown_s: 300.0, divergence: 0.1,
  divergence_evals: 3, kurtosis: 10.0, levels: {}, nan_cooldown_s: 60.0, nan_patience: 3,
  overflow: 0.01, plateau: 0.001, plateau_evals: 5, stall: 0.5}
data: {seed: null}
eval: {seed: 1337}
failure: {batch_fall: 0.02, divergence: 0.5, early_plateau: 10, entropy: 0.1, exploding: 100.0,
  gradient_norm: 1.0e-08, kurtosis: 10.0, kurtosis_growth: 3.0, noise: 1.0, overflow: 0.01,
  patience: 3, plateau: 0.02, plateau_share: 0.5, smoothing: 10, sparsity: 0.9, stall: 0.5,
  zero_gradients: 0.9, zero_zone: 0.5}
model: {constrained: [], lora_rank: null, outlier_sigma: null, outliers: none, pooling: null,
  seed: null}
monitor: {dead_steps: 100, dead_threshold: 1.0e-08, fisher: false, fisher_eigenvalues: 5,
  fisher_matrix: kfac, histogram_interval: 500, stall_interval: null}
optimizer: {clip: null, compile: false, damping: null, decay_share: 0.2, eps: null, refresh: null,
  representation: null, reset_every: null, stabilize_every: null, weight_decay_end: null,
  weight_decay_schedule: null}
runtime: {peak_tflops: null}
shadow: {of: dequantised}
tracking: {tags: [], wandb_entity: null, wandb_project: nanogpt-bench}
train: {accumulate_in: null, max_rollbacks: 3}
"""


def _gone_settings() -> dict[str, Any]:
    defaults: dict[str, Any] = {}
    for section, settings in yaml.safe_load(_GONE_YAML).items():
        for name, value in settings.items():
            defaults[f"{section}.{name}"] = value
    # Monitors were switched one by one; that of zones is newer.
    for monitor in WATCHED:
        if monitor != "zones":
            defaults[f"monitor.{monitor}"] = True
    return defaults


GONE = _gone_settings()
#: further values of settings of `GONE` that a file may give: earlier versions filled
#: them in for null, and they mean what is done today
FILLED: dict[str, tuple[Any, ...]] = {
    "model.constrained": (["attn.qkv", "attn.proj"],),
    "model.pooling": ("mean",),
    "optimizer.clip": (16.0,),
    "optimizer.damping": (2.0**-8,),
    "optimizer.eps": (1e-8,),
    "optimizer.refresh": (10,),
    "optimizer.representation": ("kfac",),
    "train.accumulate_in": ("bfloat16",),
}
#: settings of `GONE` that were filled in with the value of `seed`
SEEDS = ("data.seed", "model.seed")


def flatten(tree: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested sections, the keys checked.

    Settings of `GONE` are left out, unless their value means something else today.
    """
    pairs = list(_flat(tree, ""))
    settings = dict(pairs)
    for key, value in pairs:
        if key not in GONE:
            yield key, current_value(key, value)
        elif value != GONE[key] and value not in _harmless_values(key, settings):
            raise BenchError(f"{key}: {value!r} is no longer supported; leave {key} out")


def _harmless_values(key: str, settings: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return values of a setting of `GONE` that mean what is done today."""
    if key in SEEDS:
        return (settings.get("seed", Config().seed),)
    if key == "optimizer.damping" and optimizer_of(settings) == OptimizerName.FISHER:
        return (0.1,)
    return FILLED.get(key, ())


def _flat(tree: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    known_keys = (*FIELDS, *GONE)
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in FIELDS or key in GONE:
            yield key, value
            continue
        keys_in_section = [known for known in known_keys if known.startswith(f"{key}.")]
        if not keys_in_section:
            raise unknown_key(".".join([key, *_first_path(value)]))
        if not isinstance(value, dict):
            raise BenchError(
                f"{key}: {value!r} is not a section; give its keys, such as {keys_in_section[0]}"
            )
        yield from _flat(value, f"{key}.")


def _first_path(value: Any) -> Iterator[str]:
    """Yield the names that lead to the first setting inside a section."""
    while isinstance(value, dict) and value:
        name = next(iter(value))
        yield str(name)
        value = value[name]


def unknown_key(key: str) -> BenchError:
    """Return the error of a key that does not exist.

    It names the nearest spelling, or else the keys of the section.
    """
    for gone in GONE:
        if f"{gone}.".startswith(f"{key}.") or key.startswith(f"{gone}."):
            return BenchError(f"{key} is no longer a setting; leave it out")
    section, _, last = key.rpartition(".")
    guess = nearest(key, FIELDS)
    if guess is None:
        same_name = (known for known in FIELDS if known.rpartition(".")[2] == last)
        guess = next(same_name, None)
    if guess:
        return BenchError(f"unknown key {key!r}; did you mean {guess!r}?")
    allowed = [known for known in FIELDS if known.startswith(f"{section or key}.")]
    if not allowed:
        of_run = [known for known in FIELDS if "." not in known]
        allowed = [*sorted(SECTIONS), *of_run]
    return unknown("key", key, allowed)


def parse_overrides(arguments: Sequence[str], base: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return `base` with `--a.b value` and `--a.b=value` arguments applied.

    Values are read as YAML. One entry of a mapping can be given:
    `--model.formats.attn E4M3` leaves the other entries as they are.

    >>> parse_overrides(["--model.format", "E4M3", "--seed=3"])
    {'model.format': 'E4M3', 'seed': 3}
    """
    queue, texts = list(arguments), dict[str, str]()
    while queue:
        key, text = _next_override(queue)
        if key in texts:
            raise _twice(key)
        texts[key] = text
    values = dict(base or {})
    # Whole mappings come before entries, which change them, whatever the order.
    for key, text in texts.items():
        if mapping_above(key) is None:
            values[key] = _read_value(key, text)
    for key, text in texts.items():
        mapping = mapping_above(key)
        if mapping is None:
            continue
        entries, name = entries_of(values, mapping), key[len(mapping) + 1 :]
        if mapping in texts and name in entries:
            raise _twice(key)
        entry = text if FIELDS[mapping].facts["words"] else parse_text(text)
        values[mapping] = {**entries, name: entry}
    return values


def _twice(key: str) -> BenchError:
    return BenchError(f"--{key} is given twice; keep one")


def entries_of(values: Mapping[str, Any], mapping: str) -> dict[str, Any]:
    """Return the entries that a mapping setting has so far."""
    entries = values.get(mapping) or {}
    if not isinstance(entries, dict):
        raise BenchError(f"{mapping}: {entries!r} is not allowed; give {FIELDS[mapping].allowed}")
    return entries


def _next_override(queue: list[str]) -> tuple[str, str]:
    """Take one override off the queue and return its checked key and its text."""
    word = queue.pop(0)
    if not word.startswith("--"):
        raise BenchError(f"unexpected argument {word!r}; settings are written --section.key value")
    key, equals, text = word[2:].partition("=")
    if key not in FIELDS and not mapping_above(key):
        raise unknown_key(key)
    if not equals:
        if not queue:
            allowed = FIELDS[key].allowed if key in FIELDS else "one"
            raise BenchError(f"--{key} needs a value; give {allowed}")
        text = queue.pop(0)
    if text in RENAMED.get(key, {}):
        raise BenchError(f"--{key}: {text!r} is now called {RENAMED[key][text]!r}; give that")
    if not text.strip():
        raise BenchError(f"--{key}: {text!r} is not allowed; give {_takes(key)}, or leave it out")
    return key, text


def _takes(key: str) -> str:
    if key not in FIELDS:
        return "a value"
    choices = FIELDS[key].facts["choices"]
    return f"one of {', '.join(choices)}" if choices else FIELDS[key].allowed


def _read_value(key: str, text: str) -> Any:
    setting = FIELDS[key]
    if setting.kind is list:
        words = [part.strip(" '\"") for part in text.strip("[] ").split(",")]
        words = [word for word in words if word]
        if not words and "[" not in text:
            raise BenchError(
                f"--{key}: {text!r} has no words in it; give words with commas between them, or [] "
                "for none"
            )
        return words
    if setting.optional and text.lower() in (*NULLS, "none"):
        return None
    if setting.kind is str:
        return text
    value = parse_text(text)
    # A text without a value, such as a comment of YAML, does not mean null.
    return text if value is None else value


def build_config(values: Mapping[str, Any]) -> Config:
    """Return the `Config` of a {dotted key: value} mapping, checked."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        if key not in FIELDS:
            raise unknown_key(key)
        section, _, name = key.rpartition(".")
        branch = tree.setdefault(section, {}) if section else tree
        branch[name] = value
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise refusal(error) from None


def to_yaml(config: Config) -> str:
    """Return the settings as YAML, in the order of their declaration.

    >>> to_yaml(Config()).splitlines()[:2]
    ['rule: null', 'seed: 42']
    """
    return yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True)


def defaults_yaml() -> str:
    """Return every setting at its default as YAML.

    A comment above a setting has its meaning and the values it takes.

    >>> print(defaults_yaml().partition("task:")[2][:9])
     language
    """
    return "\n".join(_commented(Config, ""))


def _commented(section: type[SettingsSection], prefix: str) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for name, field in section.model_fields.items():
        key, kind = prefix + name, kind_of(field)
        if issubclass(kind, SettingsSection):
            yield ""
            yield f"# {field.description}"
            yield f"{name}:"
            yield from _commented(kind, f"{key}.")
            continue
        setting = FIELDS[key]
        takes = " | ".join(setting.facts["choices"] or [setting.allowed])
        yield from wrap(
            f"{setting.help} [{takes}]",
            100,
            initial_indent=f"{indent}# ",
            subsequent_indent=f"{indent}#   ",
        )
        if key == "rule":
            for rule_name, rule in RULES.items():
                yield f"#   {rule_name:<20} {rule.help} [lr {rule.lr:g}]"
        value = yaml.safe_dump([setting.default], default_flow_style=True).strip()[1:-1]
        yield f"{indent}{name}: {value}"


CONFIGS_FOLDER = Path(__file__).parent.parent / "configs"


def shipped_configs() -> list[str]:
    """Return the names of the shipped files.

    >>> "e4m3.yaml" in shipped_configs()
    True
    """
    return sorted(path.name for path in CONFIGS_FOLDER.glob("*.yaml"))


def find_config(name: str) -> Path:
    """Return the path of a configuration file, yours or a shipped one.

    `name` is a path, with or without .yaml, or the name of a shipped file.

    >>> find_config("configs/e4m3.yaml").name
    'e4m3.yaml'
    """
    return find_shipped(name, CONFIGS_FOLDER, "config")


def find_shipped(name: str, folder: Path, kind: str) -> Path:
    """Return the path of a YAML file: `name` itself, or one of a package's folder.

    The suffix .yaml may be left out. A name without it that means both a file in the
    working folder and one of the package is refused.
    """
    path = Path(name)
    file_name = path.name if path.suffix else f"{path.name}.yaml"
    local, packaged = path.with_name(file_name), folder / file_name
    is_packaged = path.parent.as_posix() in (".", folder.name) and packaged.is_file()
    try:
        if path.is_file():
            return path
        is_local = local.is_file()
    except OSError as error:
        raise BenchError(f"{kind} {name!r} can't be read: {error.strerror or error}") from None
    if is_local and is_packaged:
        raise BenchError(
            f"{kind} {name!r} could mean {str(local)!r} here or the shipped {str(packaged)!r}; "
            "give one of these paths"
        )
    if is_local:
        return local
    if is_packaged:
        return packaged
    shipped = sorted(file.name for file in folder.glob("*.yaml"))
    guess = nearest(file_name, shipped)
    hint = f"; did you mean {guess!r}?" if guess else ";"
    raise BenchError(f"{kind} {name!r} does not exist{hint} shipped: {', '.join(shipped)}")


class Resolved(Config):
    """A configuration with every value filled in.

    Only `setup.resolve.resolve` makes it. Its keys are those of `Config`: written to a
    file and read, they resolve to the same configuration.
    """

    #: linear layer -> what is quantised in it, a `LayerSpec`. In files `model.formats`
    #: says it
    layers: dict[str, Any] = Field(default_factory=dict, exclude=True)
    #: shape of the model that the run began with, where the checkpoint
    #: `model.init_from` is gone since; otherwise None
    initial_shape: Any = Field(None, exclude=True)
