"""Every setting that is refused, by its name and in one line.

Values that it can't have, and settings beside it.
"""

import re
from pathlib import Path

import pytest
from bench_runs import refusal

from nanogpt_bench.config.keys import FIELDS
from nanogpt_bench.config.rules import RULES, available_rules
from nanogpt_bench.config.schema import WITHOUT_FORMATS, Config
from nanogpt_bench.config.settings import find_config, load_config, shipped_configs
from nanogpt_bench.model.gpt import GPT_SIZES
from nanogpt_bench.setup import pretrained, start
from nanogpt_bench.setup.resolve import resolve, rule_name
from nanogpt_bench.system.errors import BenchError, nearest

E4M3 = "model.format=E4M3"
FP8 = f"{E4M3} model.storage=codes"
MASTER = f"{E4M3} model.storage=master"
LABELS = "task=classify"
PRETRAINED = "model.pretrained=a/model"
STIEFEL = "model.constraint=stiefel"
PEER = "model.peer=torchao-int8 optimizer.name=torchao_adamw8bit"
WITHIN = f"rule=stochastic {E4M3} train.step_in_backward=true"

NEAREST, STOCHASTIC = (f"rule={rule} {E4M3}" for rule in ("nearest", "stochastic"))
#: settings, and those that are refused beside them, each alone
REFUSED = {
    "": "model.headroom=4 model.granularity=tensor rule=nearest model.storage=master "
    "model.storage=peer model.peer=torchao-int4 train.parallel=fsdp train.recompute=true "
    "optimizer.writeback=nearest optimizer.moments=8bit optimizer.momentum=0.5 "
    "optimizer.float_lr=1 optimizer.stiffness=1 optimizer.constrained_lr=0.5 "
    "optimizer.retraction=euclidean "
    "optimizer.name=riemannian_adam optimizer.name=sdnq_muon",
    LABELS: f"{PRETRAINED} model.tie_weights=true data.train_tokens=500 eval.also=other "
    f"train.parallel=ddp",
    f"{LABELS} {FP8}": "optimizer.name=fisher",
    PRETRAINED: "model.torchao_float8=rowwise shadow.enabled=true runtime.compile=true model.dropout=0.5 "
    "model.init_std=0.1",
    "model.init_from=runs/first": "model.init_std=0.1",
    STIEFEL: f"{PRETRAINED} train.parallel=ddp train.precision=bf16-pure model.torchao_float8=rowwise "
    f"optimizer.name=adamw",
    f"{STIEFEL} model.n_head=1": "model.n_embd=1",
    f"{STIEFEL} optimizer.float_lr=2e-3": "optimizer.lr=1e-3",
    f"{STIEFEL} optimizer.name=riemannian_sgd": "optimizer.weight_decay=0.1 "
    "optimizer.retraction=euclidean",
    PEER: f"{PRETRAINED} model.tie_weights=true train.parallel=ddp train.precision=bf16-pure "
    f"train.precision=bf16-mixed "
    "shadow.enabled=true runtime.compile=true",
    f"{PEER} model.storage=peer": STIEFEL,
    "rule=fp32": "optimizer.writeback_end=residual8 optimizer.draws=dither model.products=fp8 "
    "model.peer=torchao-int8 train.step_in_backward=true",
    "rule=sgd": "optimizer.beta1=0.5",
    "rule=muon": "optimizer.stiffness_end=1",
    NEAREST: "optimizer.draws=dither",
    STOCHASTIC: "optimizer.stiffness_schedule=cosine optimizer.clip_by=exact "
    "optimizer.retraction=euclidean",
    f"rule=riemannian {E4M3}": "optimizer.retraction=geodesic optimizer.noise=ulp",
    f"rule=riemannian-float {E4M3}": "optimizer.noise=stiffness",
    f"rule=riemannian-float {E4M3} optimizer.grad_clip=0 train.step_in_backward=true": (
        "optimizer.noise=ulp monitor.floor_formats=[E4M3]"
    ),
    f"rule=stochastic-fp8 {E4M3}": "model.storage=grid",
    "optimizer.name=stiffness_muon": "optimizer.stiffness=1",
    E4M3: "model.tied=leave train.precision=bf16-pure model.torchao_float8=rowwise",
    FP8: "optimizer.name=torchao_adamwfp8 model.products=int8",
    MASTER: "model.products=auto",
    "model.format=E2M5 model.storage=codes": "model.products=fp8",
    f"{FP8} model.n_embd=24 model.n_head=2": "model.products=fp8",
    f"{FP8} model.granularity=square": "model.products=fp8",
    f"{FP8} optimizer.name=fisher": "train.parallel=ddp train.step_in_backward=true",
    "shadow.enabled=true": "train.parallel=ddp",
    "train.precision=bf16-pure": "model.torchao_float8=rowwise",
    "monitor.watch=[]": "train.stop_on=[divergence] train.stop_on=[nan,plateau] "
    "alerts.baseline=runs/b",
    f"{WITHIN} optimizer.grad_clip=0": "train.parallel=ddp shadow.enabled=true "
    "optimizer.clip_by=exact",
    f"{WITHIN} train.accumulation=2": "optimizer.clip_by=previous",
    f"{WITHIN} runtime.compile=true": "optimizer.clip_by=exact",
}
CASES = []
for settings, words in REFUSED.items():
    CASES += [(word.partition("=")[0], f"{settings} {word}") for word in words.split()]
#: what is refused because something else is not given, or by another name
CASES += [("optimizer.grad_clip", WITHIN), ("optimizer.name", "model.peer=torchao-int8")]
CASES += [("model.formats", f"rule=fp32 {E4M3}")]


#: how the line begins, by the words that are refused for their own sake
UNREADABLE = {
    "--train.max_stps 1": "unknown key 'train.max_stps'; did you mean 'train.max_steps'?",
    "--monitor.fisher true": "monitor.fisher is no longer a setting; leave it out",
    "--monitor.watch [bit]": "monitor.watch: 'bit' is not known; did you mean 'bits'?",
    "--train.zzz 1": "unknown key 'train.zzz'; allowed: train.max_steps, train.batch_size",
    "--train.max_steps many": "train.max_steps: 'many' is not allowed; give a whole number >= 1",
    "--train.max_steps 0": "train.max_steps: 0 is out of range; give a whole number >= 1; "
    "nanogpt-bench evaluate",
    **{
        f"--train.max_steps {number}": f"train.max_steps: '{number}' is not allowed; give a whole "
        f"number"
        for number in ("010", "1:30", "-017")  # which readers of YAML differ in
    },
    "--train.stop_on ,": "--train.stop_on: ',' has no words in it; give words with commas",
    "--optimizer.lr nan": "optimizer.lr: nan is out of range; give a number > 0 or null",
    "--optimizer.beta1 1": "optimizer.beta1: 1 is out of range; give a number >= 0 and < 1 or null",
    "--optimizer.schedule cosin": "optimizer.schedule: 'cosin' is not known; did you mean 'cosine'?",
    "--model.bias perhaps": "model.bias: 'perhaps' is not allowed; give true or false or null",
    "--model.n_embd 130": "model.n_embd: 130 is not a multiple of model.n_head 4; give a multiple "
    "of 4, such as 132",
    "--model.format E4M9": "model.formats.*: unknown float format 'E4M9'; did you mean 'E4M3'?",
    "--model.formats 7": "model.formats: 7 is not allowed; give a mapping of layer pattern to "
    "format name",
    "--monitor.gradient_format E5M3": "monitor.gradient_format: unknown float format 'E5M3'; did "
    "you mean 'E5M2'?",
    "--train.stop_on plateu": "train.stop_on: 'plateu' is not known; did you mean 'plateau'?",
    "--rule nearset": "unknown rule 'nearset'; did you mean 'nearest'?",
    f"--seed {2**64}": f"seed: {2**64} is out of range; give a whole number >= 0 and <= {2**64 - 1}",
    f"--seed {10**400}": "seed: 1000",
    "--seed": "--seed needs a value; give a whole number >= 0",
    "seed=3": "unexpected argument 'seed=3'; settings are written --section.key value",
}
#: settings that contradict a rule, and what the rule means
CONTRADICTIONS = {
    f"{NEAREST} model.storage=master": "model.storage: 'master' contradicts rule 'nearest', which "
    "sets",
    f"{STOCHASTIC} model.storage=continuous": "model.storage: 'continuous' contradicts rule "
    "'stochastic', which sets",
    f"{NEAREST} optimizer.writeback=stochastic": "optimizer.writeback: 'stochastic' contradicts "
    "rule 'nearest', which sets 'nearest'; add "
    "--optimizer.writeback null, or give --rule "
    "stochastic",
    f"{STOCHASTIC} optimizer.moments=8bit": "optimizer.moments: '8bit' contradicts rule "
    "'stochastic', which sets",
    "rule=bf16-stochastic optimizer.moments=float32": "optimizer.moments: 'float32' contradicts rule "
    "'bf16-stochastic', which sets '8bit'",
    "rule=fp32 train.precision=bf16-pure": "train.precision: 'bf16-pure' contradicts rule 'fp32', "
    "which sets",
    f"{STOCHASTIC} model.products=fp8": "model.products: 'fp8' contradicts rule 'stochastic', "
    "which sets 'decoded'",
    f"rule=stochastic-fp8 {E4M3} model.products=decoded": "model.products: 'decoded' contradicts "
    "rule 'stochastic-fp8', which sets "
    "'fp8'; add --model.products null, or "
    "give --rule stochastic-8bit",
    "rule=fp32 model.torchao_float8=rowwise": "model.torchao_float8: 'rowwise' contradicts rule "
    "'fp32', which",
}


@pytest.fixture(autouse=True)
def _a_pretrained_model(monkeypatch):
    monkeypatch.setattr(pretrained, "outlined_shape", lambda name: GPT_SIZES["0.8M"])
    monkeypatch.setattr(pretrained, "_stored", lambda model: {})
    monkeypatch.setattr(start, "newest_checkpoint", lambda name: name)
    monkeypatch.setattr(start, "start_shape", lambda name: GPT_SIZES["0.8M"])


def flagged(words: str) -> str:
    return " ".join(f"--{pair}" for pair in words.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *UNREADABLE.items(),
        *((flagged(words), message) for words, message in CONTRADICTIONS.items()),
    ],
)
def test_what_a_setting_or_beside_its_rule_can_not_have_is_refused_by_name(words, message):
    with refusal(f"^{re.escape(message)}"):
        resolve(load_config(None, words.split()))


ADVICE = re.compile(r"; add ((?:--\S+ [^\s,;]+ ?)+)")


def agreed(words: list[str], path: Path | None = None) -> Config | None:
    """The configuration once the flags that are advised were added.

    None where a refusal advises nothing.
    """
    for _ in range(6):
        try:
            return resolve(load_config(path, words))
        except BenchError as error:
            advised = ADVICE.search(str(error))
        if advised is None:
            return None
        added = [
            f"{key}={value}" for key, value in zip(*[iter(advised[1].split())] * 2, strict=True)
        ]
        keys = {word.partition("=")[0] for word in added}
        words = [word for word in words if word.partition("=")[0] not in keys] + added
    raise AssertionError(words)


@pytest.mark.parametrize(("key", "words"), CASES)
def test_what_excludes_each_other_is_refused_by_name_and_the_flags_that_are_advised_make_it_agree(
    key, words
):
    words_of_case = flagged(words).split()
    with refusal(f"^{re.escape(key)}: "):
        resolve(load_config(None, words_of_case))
    # It raises where advice leads to nothing but more advice.
    agreed(words_of_case)


@pytest.mark.parametrize(
    "name", [name for name in shipped_configs() if name not in ("gpt2.yaml", "finetune.yaml")]
)
@pytest.mark.parametrize("rule", available_rules())
def test_a_shipped_file_takes_any_rule_once_the_flags_that_are_advised_are_added(name, rule):
    arguments = [f"--rule={rule}"]
    if RULES[rule].storage not in WITHOUT_FORMATS:
        arguments.append("--model.format=E4M3")
    config = agreed(arguments, find_config(name))
    assert rule_name(config) == config.rule == rule


def test_one_edit_is_nearer_than_likeness():
    assert nearest("model.n_eabd", FIELDS) == "model.n_embd"
    assert nearest("sede", ["sides", "seed"]) == "seed"
    assert nearest("x" * 10**6, FIELDS) is None


def test_a_file_s_settings_that_get_another_meaning_are_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("rule: fp32\noptimizer: {lr: 1.0e-3}\n")
    assert load_config(path, ["--rule", "bf16-mixed"]).optimizer.lr == 1e-3
    with refusal(
        r"^optimizer\.lr: 0\.001 in the file is a rate of adamw, but sgd takes rates in another unit"
    ):
        load_config(path, ["--rule", "sgd"])
    assert load_config(path, ["--rule", "sgd", "--optimizer.lr", "0.1"]).optimizer.lr == 0.1
    path.write_text("model: {formats: {attn: E4M3}}\n")
    with refusal(
        r"^model\.formats: .* would override --model\.format E5M2; add --model\.formats {}"
    ):
        load_config(path, ["--model.format", "E5M2"])
    assert load_config(path, ["--model.formats.mlp", "E5M2"]).model.formats == {
        "attn": "E4M3",
        "mlp": "E5M2",
    }


#: a setting of every kind, of those that may be null and of those that may not
OF_EVERY_KIND = (
    "optimizer.lr",
    "optimizer.grad_clip",
    "optimizer.weight_decay",
    "model.headroom",
    "train.max_seconds",
    "train.max_steps",
    "model.bias",
    "shadow.enabled",
    "optimizer.schedule",
    "rule",
    "data.dir",
    "eval.also",
    "alerts.baseline",
    "train.stop_on",
    "model.formats",
    "model.formats.attn",
)


@pytest.mark.parametrize("text", ["", " "], ids=["empty", "blank"])
@pytest.mark.parametrize("joined", [False, True], ids=["two words", "one word"])
@pytest.mark.parametrize("key", OF_EVERY_KIND)
def test_an_empty_value_does_not_mean_the_default(key, text, joined):
    words = [f"--{key}={text}"] if joined else [f"--{key}", text]
    with refusal(rf"^--{re.escape(key)}: '{text}' is not allowed; give .*, or leave it out$"):
        load_config(None, words)


@pytest.mark.parametrize("key", [key for key in OF_EVERY_KIND if key != "model.formats.attn"])
def test_an_empty_value_in_a_file_is_refused(key, tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text(f'{key}: ""\n')
    with refusal(f"^{key}: ''"):
        load_config(path)


@pytest.mark.parametrize("text", ["# 3", "---"], ids=["comment", "document"])
def test_a_text_that_yaml_reads_as_nothing_does_not_mean_null(text):
    with refusal(f"^optimizer.lr: '{text}' is not allowed; give a number"):
        load_config(None, ["--optimizer.lr", text])


@pytest.mark.parametrize("text", ["1e-400", "1.0e-400", "-1e-400", "1e400", "1.0e+400"])
@pytest.mark.parametrize("key", ["optimizer.grad_clip", "optimizer.lr", "train.max_seconds"])
def test_a_number_that_a_float_can_not_have_is_refused(key, text, tmp_path):
    with refusal(f"^{key}: '{re.escape(text)}' is not allowed"):
        load_config(None, [f"--{key}", text])
    path = tmp_path / "my.yaml"
    path.write_text(f"{key}: {text}\n")
    with refusal("is not allowed: as a float it would become 0 or infinity"):
        load_config(path)


@pytest.mark.parametrize("text", ["0", "0.0", "0e-400", "0e400", "-0.0", "5e-324"])
def test_a_number_that_a_float_has_is_taken(text):
    config = load_config(None, ["--optimizer.weight_decay", text.removeprefix("-")])
    assert config.optimizer.weight_decay == float(text)
