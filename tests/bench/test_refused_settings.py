"""Every setting that is refused, by its name and in one line: values that it can't have, and settings beside it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from types import GeneratorType

import pytest

from nanogpt_bench.config import conflicts
from nanogpt_bench.config.keys import get
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import load_config
from nanogpt_bench.model.gpt import SIZES
from nanogpt_bench.setup import resolve as module
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.system.errors import BenchError

E4M3 = "model.format=E4M3"
FP8 = f"{E4M3} model.storage=fp8"
MASTER = f"{E4M3} model.storage=master"
LABELS = "task=classify"
GIVEN = "model.pretrained=a/model"
STIEFEL = "model.constraint=stiefel"
WITHIN = f"rule=stochastic {E4M3} train.step_in_backward=true"

#: of each setting: the settings that it is refused beside, and how the line goes on
REFUSED: dict[str, dict[str, str]] = {
    "model.pooling": {"model.pooling=last": "'last' needs task 'classify', not 'language'"},
    "model.pretrained": {
        f"{LABELS} {GIVEN}": "'a/model' can't be used with task 'classify', which brings a head",
        f"{GIVEN} {STIEFEL}": "'a/model' can't be used with model.constraint 'stiefel'; leave one of them out",
    },
    "model.tie_weights": {f"{LABELS} model.tie_weights=true": "True can't be used with task 'classify', whose lm_head"},
    "data.train_tokens": {f"{LABELS} data.train_tokens=500": "500 can't be used with task 'classify', which trains on"},
    "eval.also": {f"{LABELS} eval.also=other": "'other' can't be used with task 'classify', whose labels another"},
    "train.parallel": {
        f"{LABELS} train.parallel=ddp": "'ddp' can't be used with task 'classify', whose losses",
        "train.parallel=fsdp": "'fsdp' is not known; allowed: ddp",
        f"{STIEFEL} train.parallel=ddp": "'ddp' can't be used with model.constraint; give",
        "train.parallel=ddp shadow.enabled=true": "'ddp' can't be used with shadow.enabled; give",
        f"{WITHIN} optimizer.grad_clip=0 train.parallel=ddp": "'ddp' can't be used with train.step_in_backward; give",
    },
    "model.headroom": {"model.headroom=4": "4.0 needs model.storage grid, fp8 or continuous, not 'float32'"},
    "optimizer.writeback": {
        "optimizer.writeback=nearest": "'nearest' needs model.storage grid or fp8, not 'float32'",
        f"optimizer.writeback=residual8 {MASTER}": "'residual8' needs model.storage grid or fp8, not 'master'",
        f"optimizer.writeback=nearest {E4M3} model.storage=continuous": "'nearest' needs model.storage grid or fp8,",
    },
    "optimizer.writeback_end": {"rule=fp32 optimizer.writeback_end=residual8": "'residual8' needs model.storage grid"},
    "optimizer.draws": {"rule=fp32 optimizer.draws=dither": "'dither' needs model.storage grid or fp8, not 'float32'"},
    "optimizer.moments": {
        "optimizer.moments=8bit": "'8bit' needs model.storage grid, fp8 or continuous, not 'float32'",
        f"optimizer.moments=8bit {MASTER}": "'8bit' needs model.storage grid, fp8 or continuous, not 'master', or "
        "optimizer.name stiffness_adamw or stiffness_muon",
    },
    "optimizer.momentum": {"optimizer.momentum=0.5": "0.5 is not an option of adamw; it belongs to sgd, stiffness_sgd"},
    "optimizer.beta1": {
        "rule=sgd optimizer.beta1=0.5": "0.5 is not an option of sgd; it belongs to adamw",
        f"optimizer.name=StiffnessSGD {FP8} optimizer.beta1=0.5": "0.5 is not an option of stiffness_sgd",
    },
    "optimizer.eps": {f"optimizer.name=stiffness_lion {FP8} optimizer.eps=1": "1.0 is not an option of stiffness_lion"},
    "optimizer.clip": {
        f"{FP8} optimizer.clip=2": "2.0 is not an option of adamw; it belongs to stiffness_adamw",
        f"{FP8} optimizer.name=sgd optimizer.clip=2": "2.0 is not an option of sgd; it belongs to stiffness_adamw",
    },
    "optimizer.refresh": {f"optimizer.name=madam {FP8} optimizer.refresh=5": "5 is not an option of madam; it belongs"},
    "optimizer.float_lr": {"optimizer.float_lr=1": "1.0 is not an option of adamw; it belongs to stiffness_muon"},
    "optimizer.stiffness": {
        "optimizer.stiffness=1": "1.0 is not an option of adamw; it belongs to stiffness_adamw",
        "optimizer.name=stiffness_muon optimizer.stiffness=1": "1.0 means nothing with storage 'float32', whose",
    },
    "model.tied": {
        f"model.tied=leave {E4M3}": "'leave' needs model.tie_weights and a format; leave it out",
        "model.tied=leave model.tie_weights=true": "'leave' needs model.tie_weights and a format; leave it out",
    },
    "model.formats": {
        f"rule=fp32 {E4M3}": "{'*': 'E4M3'} can't be used with rule 'fp32', whose weights are floats; give another",
        f"{E4M3} model.storage=float32": "{'*': 'E4M3'} can't be used with storage float32, whose weights are floats",
    },
    "model.granularity": {
        "model.granularity=tensor": "'tensor' means nothing under storage float32, whose weights are floats; leave it",
        "rule=sgd model.granularity=channel": "'channel' means nothing under rule 'sgd', whose weights are floats",
    },
    "rule": {"rule=nearest": "'nearest' needs a format for the weights; give --model.format E4M3 or model.formats"},
    "model.storage": {
        "model.storage=master": "'master' needs a format for the weights; give --model.format E4M3",
    },
    "train.precision": {
        f"{E4M3} train.precision=bf16-pure": "'bf16-pure' can't be used with model.storage 'master'; allowed: float32,",
        f"{STIEFEL} train.precision=bf16-pure": "'bf16-pure' can't be used with model.constraint 'stiefel'; leave one",
    },
    "model.torchao_float8": {
        f"model.torchao_float8=rowwise {E4M3}": "'rowwise' can't be used with model.storage 'master'",
        "model.torchao_float8=rowwise train.precision=bf16-pure": "'rowwise' can't be used with train.precision",
        f"model.torchao_float8=rowwise {GIVEN}": "'rowwise' can't be used with model.pretrained; leave it out",
        f"model.torchao_float8=rowwise {STIEFEL}": "'rowwise' can't be used with model.constraint 'stiefel'; leave one",
    },
    "optimizer.name": {
        "optimizer.name=riemannian_adam": "'riemannian_adam' needs model.storage grid, fp8 or continuous, not "
        "'float32'; allowed with 'float32': adamw, sgd, stiffness_adamw, stiffness_muon",
        f"optimizer.name=madam {MASTER}": "'madam' needs model.storage grid, fp8 or continuous, not 'master'",
        f"optimizer.name=torchao_adamwfp8 {FP8}": "'torchao_adamwfp8' steps float weights; it can't be used with",
        "optimizer.name=optimi_adamw": "'optimi_adamw' sums up bfloat16 weights; give train.precision bf16-pure",
        f"{LABELS} optimizer.name=fisher {FP8}": "'fisher' can't be used with task 'classify', whose labels are not",
        f"{STIEFEL} optimizer.name=adamw": "'adamw' can't keep weights on a manifold (model.constraint 'stiefel'); "
        "allowed: riemannian_adam, riemannian_sgd",
        f"{STIEFEL} rule=stiffness {E4M3}": "'stiffness_adamw' can't keep weights on a manifold",
    },
    "optimizer.weight_decay_schedule": {
        "optimizer.weight_decay_schedule=step": "'step' needs optimizer.weight_decay_end, where it leads to"
    },
    "optimizer.stiffness_schedule": {
        f"rule=stiffness {E4M3} optimizer.stiffness_schedule=cosine": "'cosine' needs optimizer.stiffness_end, where",
        f"rule=stochastic {E4M3} optimizer.stiffness_schedule=cosine": "'cosine' is not an option of adamw",
    },
    "optimizer.weight_decay_end": {
        "optimizer.weight_decay=0 optimizer.weight_decay_end=0.1": "0.1 needs optimizer.weight_decay above 0",
        "optimizer.weight_decay=0 optimizer.weight_decay_end=0": "0.0 needs optimizer.weight_decay above 0",
    },
    "train.stop_on": {
        f"monitor.watch=[] train.stop_on=[{stops}]": f"{reason!r} needs 'trend' in monitor.watch; add it"
        for stops, reason in (("divergence", "divergence"), ("nan, plateau", "plateau"))
    },
    "alerts.baseline": {"monitor.watch=[] alerts.baseline=runs/b": "'runs/b' needs 'trend' in monitor.watch; add it"},
    "shadow.of": {
        f"{FP8} shadow.enabled=true shadow.of=master": "'master' needs a master copy, which model.storage 'fp8' "
        "does not have; allowed: dequantised"
    },
    "shadow.enabled": {
        f"{GIVEN} shadow.enabled=true": "True can't be used with model.pretrained; leave it out",
        f"{WITHIN} optimizer.grad_clip=0 shadow.enabled=true": "True can't be used with train.step_in_backward; give",
    },
    "runtime.compile": {f"{GIVEN} runtime.compile=true": "True can't be used with model.pretrained; leave it out"},
    "model.dropout": {f"{GIVEN} model.dropout=0.5": "0.5 can't be used with model.pretrained; leave it out"},
    "train.recompute": {"train.recompute=true": "True needs model.pretrained; the GPT here keeps its activations"},
    "train.step_in_backward": {
        "rule=fp32 train.step_in_backward=true": "True needs an optimizer of the library that steps weights one by "
        "one, not 'adamw' with model.storage 'float32'",
        f"optimizer.name=fisher {FP8} train.step_in_backward=true": "True needs an optimizer of the library that steps",
    },
    "optimizer.grad_clip": {
        WITHIN: "1.0 with train.step_in_backward needs optimizer.clip_by previous (by the norm of the step before, one "
        "backward pass) or exact (two backward passes); or give 0"
    },
    "optimizer.clip_by": {
        f"rule=stochastic {E4M3} optimizer.clip_by=exact": "'exact' needs train.step_in_backward, optimizer.grad_clip",
        f"{WITHIN} optimizer.grad_clip=0 optimizer.clip_by=exact": "'exact' needs train.step_in_backward, optimizer",
        f"{WITHIN} optimizer.clip_by=previous train.accumulation=2 train.accumulate_in=bfloat16": "'previous' needs",
        f"{WITHIN} optimizer.clip_by=exact runtime.compile=true": "'exact' can't be used with runtime.compile, whose",
    },
    "train.accumulate_in": {
        f"{WITHIN} optimizer.grad_clip=0 train.accumulate_in=bfloat16": "'bfloat16' needs train.step_in_backward and",
        f"rule=stochastic {E4M3} train.accumulation=2 train.accumulate_in=bfloat16": "'bfloat16' needs train.step_in",
    },
    "train.accumulation": {
        f"{WITHIN} optimizer.grad_clip=0 train.accumulation=2": "2 with train.step_in_backward needs "
        "train.accumulate_in bfloat16 (a sum of two bytes a weight); or give 1"
    },
    "model.constrained": {"model.constrained=[attn]": "['attn'] needs model.constraint stiefel or sphere"},
    "optimizer.constrained_lr": {"optimizer.constrained_lr=0.5": "0.5 needs model.constraint stiefel or sphere"},
    "model.n_embd": {
        f"{STIEFEL} model.n_embd=1 model.n_head=1": "1 leaves nothing to turn under model.constraint 'stiefel'; give 2"
    },
    "optimizer.lr": {
        f"{STIEFEL} optimizer.lr=1e-3 optimizer.float_lr=2e-3": "0.001 and optimizer.float_lr 0.002 are two rates for "
        "the same weights: none is stepped by ULPs with model.storage 'float32'; give one of them"
    },
    "optimizer.weight_decay": {
        f"{STIEFEL} optimizer.name=riemannian_sgd optimizer.weight_decay=0.1": "0.1 is of weights that riemannian_sgd "
        "steps by ULPs: none with model.storage 'float32'; leave it out"
    },
}
PEER = "model.peer=torchao-int8 optimizer.name=torchao_adamw8bit"
#: the same of weights of other packages
REFUSED_PEERS: dict[str, dict[str, str]] = {
    "model.peer": {
        "rule=fp32 model.peer=sdnq-int8": "'sdnq-int8' needs model.storage peer, not 'float32'; leave",
        "model.peer=sdnq-E2M4": "'sdnq-E2M4' is not known; did you mean 'sdnq-E2M5'?",
    },
    "train.precision": {
        f"{PEER} train.precision=bf16-pure": "'bf16-pure' can't be used with model.storage 'peer'",
        f"{PEER} train.precision=bf16-mixed": "'bf16-mixed' can't be used with model.peer 'torchao-int8', of one",
    },
    "train.parallel": {f"{PEER} train.parallel=ddp": "'ddp' can't be used with model.peer"},
    "train.step_in_backward": {f"{PEER} train.step_in_backward=true": "True needs an optimizer of the library"},
    "model.storage": {"model.storage=peer": "'peer' needs model.peer sdnq-E2M5, sdnq-E4M3, sdnq-int8 or torchao-int8"},
    "optimizer.name": {
        "model.peer=sdnq-int8": "'adamw' can't step the weights of model.peer 'sdnq-int8'; allowed: sdnq_muon, sdnq_a",
        "optimizer.name=sdnq_muon": "'sdnq_muon' steps SDNQ's own weights; it can't be used with model.storage",
    },
    "model.formats": {f"{PEER} {E4M3}": "{'*': 'E4M3'} can't be used with storage peer, whose weights are another"},
    "model.pretrained": {f"{PEER} {GIVEN}": "'a/model' can't be used with model.peer 'torchao-int8'; leave it out"},
    "model.constraint": {
        f"{PEER} model.storage=peer {STIEFEL}": "'stiefel' can't be used with model.peer 'torchao-int8'; leave it out"
    },
    **{
        key: {f"{PEER} {key}=true": "True can't be used with model.peer 'torchao-int8'; leave it out"}
        for key in ("model.tie_weights", "shadow.enabled", "runtime.compile")
    },
}
for _key, _cases in REFUSED_PEERS.items():
    REFUSED.setdefault(_key, {}).update(_cases)
CASES = [(key, words, said) for key, cases in REFUSED.items() for words, said in cases.items()]


#: how the line begins, by the words that are refused for their own sake
UNREADABLE: dict[str, str] = {
    "--train.max_stps 1": "unknown key 'train.max_stps'; did you mean 'train.max_steps'?",
    "--max_steps 1": "unknown key 'max_steps'; did you mean 'train.max_steps'?",
    "--monitor.fisher true": "monitor.fisher is no setting any more; leave it out",
    "--monitor.bits false": "monitor.bits is no setting any more; leave it out",
    "--monitor.watch [bit]": "monitor.watch: 'bit' is not known; did you mean 'bits'?",
    "--train.zzz 1": "unknown key 'train.zzz'; allowed: train.max_steps, train.batch_size",
    "--train.max_steps many": "train.max_steps: 'many' is not allowed; give a whole number >= 1",
    "--train.max_steps 1.5": "train.max_steps: 1.5 is not allowed; give a whole number >= 1",
    "--train.max_steps 0": "train.max_steps: 0 is out of range; give a whole number >= 1; nanogpt-bench evaluate",
    **{
        f"--train.max_steps {number}": f"train.max_steps: '{number}' is not allowed; give a whole number"
        for number in ("010", "1:30", "-017")  # which readers of YAML differ in
    },
    "--optimizer.lr nan": "optimizer.lr: nan is out of range; give a number > 0 or null",
    "--optimizer.lr=-1": "optimizer.lr: -1 is out of range; give a number > 0 or null",
    "--optimizer.beta1 1": "optimizer.beta1: 1 is out of range; give a number >= 0 and < 1 or null",
    "--optimizer.schedule cosin": "optimizer.schedule: 'cosin' is not known; did you mean 'cosine'?",
    "--optimizer.writeback residual": "optimizer.writeback: 'residual' is not known; did you mean 'residual8'?",
    "--optimizer.moments 8-bits": "optimizer.moments: '8-bits' is not known; did you mean '8bit'?",
    "--optimizer.draws dithered": "optimizer.draws: 'dithered' is not known; did you mean 'dither'?",
    "--optimizer.name stifness_sgd": "optimizer.name: 'stifness_sgd' is not known; did you mean 'stiffness_sgd'?",
    "--model.bias perhaps": "model.bias: 'perhaps' is not allowed; give true or false or null",
    "--model.n_embd 130": "model.n_embd: 130 is not a multiple of model.n_head 4; give a multiple of 4, such as 132",
    "--model.storage fp9": "model.storage: 'fp9' is not known; did you mean 'fp8'?",
    "--model.format E4M9": "model.formats.*: unknown float format 'E4M9'; did you mean 'E4M3'?",
    "--model.formats 7": "model.formats: 7 is not allowed; give a mapping of layer pattern to format name",
    "--model.pooling max": "model.pooling: 'max' is not known; allowed: mean, last",
    "--model.constraint stifel": "model.constraint: 'stifel' is not known; did you mean 'stiefel'?",
    "--model.torchao_float8 rowise": "model.torchao_float8: 'rowise' is not known; did you mean 'rowwise'?",
    "--monitor.gradient_format E5M3": "monitor.gradient_format: unknown float format 'E5M3'; did you mean 'E5M2'?",
    "--alerts.at_most.grad/norm 2": "alerts.at_most.grad/norm is no setting any more; leave it out",
    "--failure.stall 0.4": "failure.stall is no setting any more; leave it out",
    "--train.stop_on plateu": "train.stop_on: 'plateu' is not known; did you mean 'plateau'?",
    "--shadow.of masters": "shadow.of: 'masters' is not known; did you mean 'master'?",
    "--task clasify": "task: 'clasify' is not known; did you mean 'classify'?",
    "--rule nearset": "unknown rule 'nearset'; did you mean 'nearest'?",
    **{
        f"--{key} {2**64}": f"{key}: {2**64} is out of range; give a whole number >= 0 and <= {2**64 - 1}"
        for key in ("seed", "data.seed", "model.seed")
    },
    f"--seed {10**400}": "seed: 1000",
    "--seed": "--seed needs a value; give a whole number >= 0",
    "seed=3": "unexpected argument 'seed=3'; settings are written --section.key value",
}
NEAREST, STOCHASTIC = (f"rule={rule} {E4M3}" for rule in ("nearest", "stochastic"))
#: settings that contradict a rule, and what the rule means
CONTRADICTIONS = {
    f"{NEAREST} model.storage=master": "model.storage: 'master' contradicts rule 'nearest', which means",
    f"{STOCHASTIC} model.storage=continuous": "model.storage: 'continuous' contradicts rule 'stochastic', which means",
    f"{NEAREST} optimizer.writeback=stochastic": "optimizer.writeback: 'stochastic' contradicts rule 'nearest', which",
    f"{STOCHASTIC} optimizer.moments=8bit": "optimizer.moments: '8bit' contradicts rule 'stochastic', which means",
    "rule=fp32 train.precision=bf16-pure": "train.precision: 'bf16-pure' contradicts rule 'fp32', which means",
    "rule=fp32 model.torchao_float8=rowwise": "model.torchao_float8: 'rowwise' contradicts rule 'fp32', which",
}


@pytest.fixture(autouse=True)
def _a_pretrained_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "outlined_shape", lambda name: SIZES["0.8M"])


def resolved(words: str) -> Config:
    """Resolve `key=value`s apart by spaces; the pair in brackets of a list holds one itself."""
    pairs = words.replace(", ", ",").split()
    return resolve(load_config(None, [f"--{pair}" for pair in pairs]))


def assert_refused(caught: pytest.ExceptionInfo[BenchError], said: str) -> None:
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("words", "said"), UNREADABLE.items())
def test_what_a_setting_can_not_have_is_refused_by_name(words: str, said: str) -> None:
    with pytest.raises(BenchError) as caught:
        resolve(load_config(None, words.split()))
    assert_refused(caught, said)


@pytest.mark.parametrize(("words", "said"), CONTRADICTIONS.items())
def test_what_a_rule_means_is_not_contradicted(words: str, said: str) -> None:
    with pytest.raises(BenchError) as caught:
        resolved(words)
    assert_refused(caught, said)


@pytest.mark.parametrize(("key", "words", "said"), CASES)
def test_what_excludes_each_other_is_refused_by_name(key: str, words: str, said: str) -> None:
    with pytest.raises(BenchError) as caught:
        resolved(words)
    assert_refused(caught, f"{key}: {said}")


def test_every_row_of_the_tables_refuses_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generic tables, of storages and of options, count as one row each."""
    there: set[tuple[str, int]] = set()
    fired: set[tuple[str, int]] = set()

    def note(config: Config, rows: Iterable[conflicts.Row]) -> None:
        name = rows.__name__ if isinstance(rows, GeneratorType) else "as given"
        for place, (key, refused, _) in enumerate(rows):
            row = (name, 0 if name in ("_storages", "_options") else place)
            there.add(row)
            if refused and conflicts._asks(get(config, key)):
                fired.add(row)

    monkeypatch.setattr(conflicts, "_refuse", note)
    for _, words, _ in CASES:
        if not words.startswith("monitor.watch=[] train"):  # the only row that raises by itself
            with suppress(BenchError):
                resolved(words)
    assert there - fired - {("_watching", 0)} == set()
    assert len(there) > 40


@pytest.mark.parametrize(
    "words",
    [
        *(
            "rule=fp32",
            f"rule=stochastic {E4M3}",
            f"rule=muon-stochastic {E4M3} optimizer.draws=dither",
            GIVEN,
            STIEFEL,
        ),
        f"{WITHIN} optimizer.grad_clip=0",
        f"rule=nearest {E4M3} model.granularity=tensor",
        f"{GIVEN} train.recompute=true",
        f"{LABELS} model.pooling=last",
        "optimizer.weight_decay_end=0 optimizer.weight_decay_schedule=step",
    ],
)
def test_what_goes_together_is_not_refused(words: str) -> None:
    resolved(words)
