"""Every setting that is refused, by its name and in one line: values that it can't have, and settings beside it."""

import re
from contextlib import suppress
from types import GeneratorType

import pytest
from bench_runs import refusal
from laws import each

from nanogpt_bench.config import conflicts
from nanogpt_bench.config.keys import get
from nanogpt_bench.config.rules import RULES, available_rules
from nanogpt_bench.config.schema import WITHOUT_FORMATS, Config
from nanogpt_bench.config.settings import find_config, load_config, shipped_configs
from nanogpt_bench.model.gpt import SIZES
from nanogpt_bench.setup import pretrained
from nanogpt_bench.setup.resolve import resolve, rule_name
from nanogpt_bench.system.errors import BenchError

E4M3 = "model.format=E4M3"
FP8 = f"{E4M3} model.storage=fp8"
MASTER = f"{E4M3} model.storage=master"
LABELS = "task=classify"
GIVEN = "model.pretrained=a/model"
STIEFEL = "model.constraint=stiefel"
PEER = "model.peer=torchao-int8 optimizer.name=torchao_adamw8bit"
WITHIN = f"rule=stochastic {E4M3} train.step_in_backward=true"

#: of each setting: settings that it is refused beside
REFUSED = {
    "model.pretrained": [f"{LABELS} {GIVEN}", f"{GIVEN} {STIEFEL}", f"{PEER} {GIVEN}"],
    "model.tie_weights": [f"{LABELS} model.tie_weights=true", f"{PEER} model.tie_weights=true"],
    "data.train_tokens": [f"{LABELS} data.train_tokens=500"],
    "eval.also": [f"{LABELS} eval.also=other"],
    "train.parallel": [
        f"optimizer.name=fisher {FP8} train.parallel=ddp",
        f"{LABELS} train.parallel=ddp",
        "train.parallel=fsdp",
        f"{STIEFEL} train.parallel=ddp",
        "train.parallel=ddp shadow.enabled=true",
        f"{WITHIN} optimizer.grad_clip=0 train.parallel=ddp",
        f"{PEER} train.parallel=ddp",
    ],
    "model.headroom": ["model.headroom=4"],
    "optimizer.writeback": ["optimizer.writeback=nearest"],
    "optimizer.writeback_end": ["rule=fp32 optimizer.writeback_end=residual8"],
    "optimizer.draws": ["rule=fp32 optimizer.draws=dither"],
    "optimizer.moments": ["optimizer.moments=8bit"],
    "optimizer.momentum": ["optimizer.momentum=0.5"],
    "optimizer.beta1": ["rule=sgd optimizer.beta1=0.5"],
    "optimizer.float_lr": ["optimizer.float_lr=1"],
    "optimizer.stiffness": ["optimizer.stiffness=1", "optimizer.name=stiffness_muon optimizer.stiffness=1"],
    "model.tied": [f"model.tied=leave {E4M3}"],
    "model.formats": [f"rule=fp32 {E4M3}"],
    "model.granularity": ["model.granularity=tensor"],
    "rule": ["rule=nearest"],
    "model.storage": [f"rule=stochastic-fp8 {E4M3} model.storage=grid", "model.storage=master", "model.storage=peer"],
    "train.precision": [
        f"{E4M3} train.precision=bf16-pure",
        f"{STIEFEL} train.precision=bf16-pure",
        f"{PEER} train.precision=bf16-pure",
        f"{PEER} train.precision=bf16-mixed",
    ],
    "model.torchao_float8": [
        f"model.torchao_float8=rowwise {E4M3}",
        "model.torchao_float8=rowwise train.precision=bf16-pure",
        f"model.torchao_float8=rowwise {GIVEN}",
        f"model.torchao_float8=rowwise {STIEFEL}",
    ],
    "model.products": [
        f"model.products=auto {MASTER}",
        "rule=fp32 model.products=fp8",
        f"model.products=int8 {FP8}",
        "model.products=fp8 model.format=E2M5 model.storage=fp8",
        f"model.products=fp8 {FP8} model.n_embd=24 model.n_head=2",
        f"model.products=fp8 {FP8} model.granularity=square",
    ],
    "optimizer.name": [
        "optimizer.name=riemannian_adam",
        f"optimizer.name=torchao_adamwfp8 {FP8}",
        "optimizer.name=optimi_adamw",
        f"{LABELS} optimizer.name=fisher {FP8}",
        f"{STIEFEL} optimizer.name=adamw",
        "model.peer=sdnq-int8",
        "optimizer.name=sdnq_muon",
    ],
    "optimizer.stiffness_schedule": [f"rule=stochastic {E4M3} optimizer.stiffness_schedule=cosine"],
    "train.stop_on": ["monitor.watch=[] train.stop_on=[divergence]", "monitor.watch=[] train.stop_on=[nan, plateau]"],
    "alerts.baseline": ["monitor.watch=[] alerts.baseline=runs/b"],
    "shadow.enabled": [
        f"{GIVEN} shadow.enabled=true",
        f"{WITHIN} optimizer.grad_clip=0 shadow.enabled=true",
        f"{PEER} shadow.enabled=true",
    ],
    "runtime.compile": [f"{GIVEN} runtime.compile=true", f"{PEER} runtime.compile=true"],
    "model.dropout": [f"{GIVEN} model.dropout=0.5"],
    "train.recompute": ["train.recompute=true"],
    "train.step_in_backward": [
        "rule=fp32 train.step_in_backward=true",
        f"optimizer.name=fisher {FP8} train.step_in_backward=true",
    ],
    "optimizer.grad_clip": [WITHIN],
    "optimizer.clip_by": [
        f"rule=stochastic {E4M3} optimizer.clip_by=exact",
        f"{WITHIN} optimizer.grad_clip=0 optimizer.clip_by=exact",
        f"{WITHIN} optimizer.clip_by=previous train.accumulation=2",
        f"{WITHIN} optimizer.clip_by=exact runtime.compile=true",
    ],
    "optimizer.constrained_lr": ["optimizer.constrained_lr=0.5"],
    "model.n_embd": [f"{STIEFEL} model.n_embd=1 model.n_head=1"],
    "optimizer.lr": [f"{STIEFEL} optimizer.lr=1e-3 optimizer.float_lr=2e-3"],
    "optimizer.weight_decay": [f"{STIEFEL} optimizer.name=riemannian_sgd optimizer.weight_decay=0.1"],
    "model.peer": ["rule=fp32 model.peer=sdnq-int8", "model.peer=sdnq-E2M4"],
    "model.constraint": [f"{PEER} model.storage=peer {STIEFEL}"],
}
CASES = [(key, words) for key, cases in REFUSED.items() for words in cases]


#: how the line begins, by the words that are refused for their own sake
UNREADABLE = {
    "--train.max_stps 1": "unknown key 'train.max_stps'; did you mean 'train.max_steps'?",
    "--monitor.fisher true": "monitor.fisher is no setting any more; leave it out",
    "--monitor.bits false": "monitor.bits is no setting any more; leave it out",
    "--monitor.watch [bit]": "monitor.watch: 'bit' is not known; did you mean 'bits'?",
    "--train.zzz 1": "unknown key 'train.zzz'; allowed: train.max_steps, train.batch_size",
    "--train.max_steps many": "train.max_steps: 'many' is not allowed; give a whole number >= 1",
    "--train.max_steps 0": "train.max_steps: 0 is out of range; give a whole number >= 1; nanogpt-bench evaluate",
    **{
        f"--train.max_steps {number}": f"train.max_steps: '{number}' is not allowed; give a whole number"
        for number in ("010", "1:30", "-017")  # which readers of YAML differ in
    },
    "--optimizer.lr nan": "optimizer.lr: nan is out of range; give a number > 0 or null",
    "--optimizer.beta1 1": "optimizer.beta1: 1 is out of range; give a number >= 0 and < 1 or null",
    "--optimizer.schedule cosin": "optimizer.schedule: 'cosin' is not known; did you mean 'cosine'?",
    "--model.bias perhaps": "model.bias: 'perhaps' is not allowed; give true or false or null",
    "--model.n_embd 130": "model.n_embd: 130 is not a multiple of model.n_head 4; give a multiple of 4, such as 132",
    "--model.format E4M9": "model.formats.*: unknown float format 'E4M9'; did you mean 'E4M3'?",
    "--model.formats 7": "model.formats: 7 is not allowed; give a mapping of layer pattern to format name",
    "--monitor.gradient_format E5M3": "monitor.gradient_format: unknown float format 'E5M3'; did you mean 'E5M2'?",
    "--alerts.at_most.grad/norm 2": "alerts.at_most.grad/norm is no setting any more; leave it out",
    "--failure.stall 0.4": "failure.stall is no setting any more; leave it out",
    "--train.stop_on plateu": "train.stop_on: 'plateu' is not known; did you mean 'plateau'?",
    "--rule nearset": "unknown rule 'nearset'; did you mean 'nearest'?",
    f"--seed {2**64}": f"seed: {2**64} is out of range; give a whole number >= 0 and <= {2**64 - 1}",
    f"--seed {10**400}": "seed: 1000",
    "--seed": "--seed needs a value; give a whole number >= 0",
    "seed=3": "unexpected argument 'seed=3'; settings are written --section.key value",
}
NEAREST, STOCHASTIC = (f"rule={rule} {E4M3}" for rule in ("nearest", "stochastic"))
#: settings that contradict a rule, and what the rule means
CONTRADICTIONS = {
    f"{NEAREST} model.storage=master": "model.storage: 'master' contradicts rule 'nearest', which means",
    f"{STOCHASTIC} model.storage=continuous": "model.storage: 'continuous' contradicts rule 'stochastic', which means",
    f"{NEAREST} optimizer.writeback=stochastic": "optimizer.writeback: 'stochastic' contradicts rule 'nearest', which "
    "means 'nearest'; add --optimizer.writeback null, or give --rule stochastic",
    f"{STOCHASTIC} optimizer.moments=8bit": "optimizer.moments: '8bit' contradicts rule 'stochastic', which means",
    "rule=fp32 train.precision=bf16-pure": "train.precision: 'bf16-pure' contradicts rule 'fp32', which means",
    f"{STOCHASTIC} model.products=fp8": "model.products: 'fp8' contradicts rule 'stochastic', which means 'decoded'",
    f"rule=stochastic-fp8 {E4M3} model.products=decoded": "model.products: 'decoded' contradicts rule "
    "'stochastic-fp8', which means 'fp8'; add --model.products null, or give --rule stochastic-8bit",
    "rule=fp32 model.torchao_float8=rowwise": "model.torchao_float8: 'rowwise' contradicts rule 'fp32', which",
}


@pytest.fixture(autouse=True)
def _a_pretrained_model(monkeypatch):
    monkeypatch.setattr(pretrained, "outlined_shape", lambda name: SIZES["0.8M"])
    monkeypatch.setattr(pretrained, "_stored", lambda model: {})


def flagged(words: str) -> str:
    """Return words `key=value` as flags; the pair in brackets of a list holds one itself."""
    return " ".join(f"--{pair}" for pair in words.replace(", ", ",").split())


def resolved(words: str) -> Config:
    return resolve(load_config(None, flagged(words).split()))


@each(("words", "said"), [*UNREADABLE.items(), *((flagged(words), said) for words, said in CONTRADICTIONS.items())])
def test_what_a_setting_or_beside_its_rule_can_not_have_is_refused_by_name(words, said):
    with refusal(f"^{re.escape(said)}"):
        resolve(load_config(None, words.split()))


ADVICE = re.compile(r"; add ((?:--\S+ [^\s,;]+ ?)+)")


@each(("key", "words"), CASES)
def test_what_excludes_each_other_is_refused_by_name_and_the_flags_that_are_advised_make_it_agree(key, words):
    with refusal(f"^{re.escape(key)}: ") as caught:
        resolved(words)
    given = flagged(words).split()
    for _ in range(4):
        if (advised := ADVICE.search(str(caught.value))) is None:
            return
        added = [f"{key}={value}" for key, value in zip(*[iter(advised[1].split())] * 2, strict=True)]
        given = [word for word in given if word.partition("=")[0] not in {each.partition("=")[0] for each in added}]
        given += added
        try:
            resolve(load_config(None, given))
        except BenchError as error:
            caught = pytest.ExceptionInfo.from_exception(error)
        else:
            return
    raise AssertionError(f"still refused: {caught.value}")


@each("name", [name for name in shipped_configs() if name not in ("gpt2.yaml", "finetune.yaml")])
def test_a_shipped_file_takes_any_rule_once_the_flags_that_are_advised_are_added(name):
    for rule in available_rules():
        given = ["--rule", rule, *([] if RULES[rule].storage in WITHOUT_FORMATS else ["--model.format", "E4M3"])]
        for _ in range(6):
            try:
                config = resolve(load_config(find_config(name), given))
            except BenchError as error:
                given += (ADVICE.search(str(error)) or {1: ""})[1].split()
            else:
                assert rule_name(config) == config.rule == rule
                break
        else:
            raise AssertionError(given)


def test_a_file_s_settings_that_get_another_meaning_are_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("rule: fp32\noptimizer: {lr: 1.0e-3}\n")
    assert load_config(path, ["--rule", "bf16-mixed"]).optimizer.lr == 1e-3
    with refusal(r"^optimizer\.lr: 0\.001 is the file's for adamw, and sgd has another unit"):
        load_config(path, ["--rule", "sgd"])
    assert load_config(path, ["--rule", "sgd", "--optimizer.lr", "0.1"]).optimizer.lr == 0.1
    path.write_text("model: {formats: {attn: E4M3}}\n")
    with refusal(r"^model\.formats: .* stays beside --model\.format E5M2; add --model\.formats {}"):
        load_config(path, ["--model.format", "E5M2"])
    assert load_config(path, ["--model.formats.mlp", "E5M2"]).model.formats == {"attn": "E4M3", "mlp": "E5M2"}


def test_every_row_of_the_tables_refuses_something(monkeypatch):
    """The generic tables, of storages and of options, count as one row each."""
    there = set()
    fired = set()

    def note(config, rows):
        name = rows.__name__ if isinstance(rows, GeneratorType) else "as given"
        for place, (key, refused, _) in enumerate(rows):
            row = (name, 0 if name in ("_storages", "_options") else place)
            there.add(row)
            if refused and conflicts._asks(get(config, key)):
                fired.add(row)

    monkeypatch.setattr(conflicts, "_refuse", note)
    for _, words in CASES:
        if not words.startswith("monitor.watch=[] train"):  # the only row that raises by itself
            with suppress(BenchError):
                resolved(words)
    assert there - fired - {("_watching", 0)} == set()
    assert len(there) > 40
