"""Clipping in every place.

Before the weights' gradients are quantised, of the sum, and in the backward pass.
"""

import pytest
import torch
from bench_runs import flags, one_step, records_of, refusal, trainer_of

import fp8manifold as fm
from nanogpt_bench.cli import main
from nanogpt_bench.config.settings import find_config, load_config
from nanogpt_bench.loop.clipping import Clipping, ClippingFirst
from nanogpt_bench.monitors import Observer

CLIP = 0.02
SCALES = {
    "dynamic": {},
    "static": {"policy": "static"},
    "delayed": {"policy": "delayed", "history": 2},
}
SCALES |= {
    "fixed": {"scale": 2.0**-24},
    "global": {"scale": "global"},
    "block": {"granularity": "block"},
}


class GradientRecorder(Observer):
    """The gradients that the optimizer is given."""

    def before_step(self, step):
        self.gradients = grads_of(step.model)


def grads_of(model):
    return {
        name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None
    }


def norm_of(gradients):
    return (
        torch.stack([gradient.square().sum() for gradient in gradients.values()])
        .sum()
        .sqrt()
        .item()
    )


def settings_of(weight, accumulation, clip, **overrides):
    gradient = {"gradient": {"weight": {"format": "E4M3", **weight}}} if weight is not None else {}
    settings = {
        "rule": "master",
        "train__precision": "float32",
        "train__accumulation": accumulation,
        "model__n_embd": 32,
    }
    return (
        settings
        | {"model__formats": {"*": {"weight": "E4M3", **gradient}}, "optimizer__grad_clip": clip}
        | overrides
    )


def float_micro_gradients(trainer, index):
    """The gradients of every micro-batch of a step, over their number.

    Those of weights have no format.
    """
    gradients = []
    for micro_step in range(trainer.config.train.accumulation):
        trainer.model.zero_grad()
        tokens, targets = trainer._move(trainer._draw(index, micro_step))
        (trainer.loss(tokens, targets) / trainer.config.train.accumulation).backward()
        gradients.append(grads_of(trainer.model))
    return gradients


class Oracle:
    """The definition, in a loop: clip, find the scale, round, add."""

    def __init__(self, kind, layers, accumulation):
        self.kind, self.layers, self.bound = kind, layers, CLIP / accumulation
        self.past = {layer: [] for layer in layers}
        self.last_pass = 0.0

    def total(self, micro):
        total = {}
        for gradients in micro:
            factor = min(1.0, self.bound / (norm_of(gradients) + 1e-6))
            clipped = {name: gradient * factor for name, gradient in gradients.items()}
            for name, value in self.rounded(clipped).items():
                total[name] = total.get(name, torch.zeros_like(value)) + value
        return total

    def rounded(self, gradients):
        so_far, out = 0.0, dict(gradients)
        for layer in self.layers:
            gradient = gradients[f"{layer}.weight"]
            amax = gradient.abs().max().item()
            so_far = max(so_far, amax)
            out[f"{layer}.weight"] = self.round(layer, gradient, amax, so_far)
            self.past[layer].append(amax)
        self.last_pass = so_far
        return out

    def round(self, layer, gradient, amax, so_far):
        if self.kind == "block":
            return fm.fake_quantize(gradient, "E4M3", granularity="block")
        past = self.past[layer]
        magnitude = {
            "static": past[0] if past else amax,
            "delayed": max(past[-2:], default=amax),
            "fixed": 448 * 2.0**-24,
            "global": self.last_pass or so_far,
        }.get(self.kind, amax)
        return fm.fake_quantize(gradient, "E4M3", scale=magnitude / 448)


@pytest.mark.filterwarnings("ignore:a frozen E4M3 scale saturates")
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("kind", SCALES)
def test_micro_batches_are_clipped_then_quantised_then_added_up(tiny, kind, accumulation):
    trainer = trainer_of(tiny(**settings_of(SCALES[kind], accumulation, CLIP)))
    floats = trainer_of(tiny(**settings_of(None, accumulation, 0.0)))
    layers = [
        name
        for name, module in floats.model.named_modules()
        if isinstance(module, fm.QuantizedLinear)
    ]
    oracle, recorder = Oracle(kind, layers, accumulation), GradientRecorder()
    for number in (1, 2, 3):
        floats.model.load_state_dict(fm.files.unflatten(trainer.model.state_dict()), strict=False)
        micro = float_micro_gradients(floats, number - 1)
        expected = oracle.total(micro)
        step = one_step(trainer, number, recorder)
        whole = {name: sum(one[name] for one in micro) for name in micro[0]}
        assert step.record["grad/norm"] == pytest.approx(norm_of(whole), rel=1e-4), number
        assert step.record["grad/clipped"] == 1, number
        assert step.clip_factor == pytest.approx(
            CLIP / accumulation / norm_of(micro[-1]), rel=1e-3
        ), number
        assert norm_of(recorder.gradients) < CLIP * 1.05, number
        for name, gradient in recorder.gradients.items():
            # float32's own noise may tip a value that lies halfway between two of the
            # format
            assert (gradient - expected[name]).norm() <= 0.01 * expected[name].norm(), (
                name,
                number,
            )


@pytest.mark.parametrize("kind", ["fixed", "delayed", "global"])
def test_what_is_clipped_first_does_not_saturate(tiny, kind):
    """Clipping takes away a spike of a million times the gradient.

    The spike passes a scale that does not move with it.
    """
    scale = {"scale": 2.0**-12} if kind == "fixed" else SCALES[kind]
    trainer, recorder = trainer_of(tiny(**settings_of(scale, 1, 1.0))), GradientRecorder()
    one_step(trainer, 1, recorder)
    calm = trainer._model_loss
    trainer._model_loss = lambda tokens, targets: calm(tokens, targets) * 1e6
    step = one_step(trainer, 2, recorder)
    assert step.record["grad/norm"] > 1e5
    assert norm_of(recorder.gradients) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("clip", [CLIP, 0.0])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_without_a_format_for_them_gradients_are_clipped_as_torch_does(tiny, accumulation, clip):
    trainer = trainer_of(tiny(**settings_of(None, accumulation, clip)))
    assert type(trainer._clipping) is Clipping
    micro = float_micro_gradients(trainer, 0)
    trainer.model.zero_grad()
    for name, parameter in trainer.model.named_parameters():
        for one in micro:
            parameter.grad = (
                one[name].clone() if parameter.grad is None else parameter.grad.add_(one[name])
            )
    norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), clip or float("inf")).item()
    expected = grads_of(trainer.model)
    recorder = GradientRecorder()
    step = one_step(trainer, 1, recorder)
    assert (step.record["grad/norm"], step.record["grad/clipped"], step.clip_factor) == (
        norm,
        int(clip > 0),
        1.0,
    )
    assert all(
        torch.equal(gradient, expected[name]) for name, gradient in recorder.gradients.items()
    )


@pytest.mark.parametrize("clip", [1e6, 0.0])
def test_unclipped_gradients_are_those_that_the_layers_quantise_themselves(tiny, clip):
    stochastic = {"rounding": "stochastic"}
    trainer, itself = (trainer_of(tiny(**settings_of(stochastic, 2, clip))) for _ in range(2))
    assert type(trainer._clipping) is ClippingFirst
    for layer in itself.model.modules():
        if isinstance(layer, fm.QuantizedLinear):
            layer._defers_weight_gradient = False
    for micro_step in (0, 1):
        (itself.loss(*itself._draw(0, micro_step)) / 2).backward()
    recorder = GradientRecorder()
    step = one_step(trainer, 1, recorder)
    assert step.record["grad/clipped"] == 0
    for name, gradient in grads_of(itself.model).items():
        assert (recorder.gradients[name] - gradient).norm() <= 1e-3 * gradient.norm(), name


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_gradient_that_is_not_finite_is_seen_and_the_weights_stay(tiny, bad, accumulation):
    trainer = trainer_of(tiny(**settings_of(SCALES["delayed"], accumulation, CLIP)))
    old_weight = trainer.model.lm_head.weight.detach().clone()
    handle = trainer.model.final_norm.weight.register_hook(lambda gradient: gradient + bad)
    assert one_step(trainer).record["grad_has_nan"] == 1
    assert torch.equal(trainer.model.lm_head.weight, old_weight)
    handle.remove()
    record = one_step(trainer, 2).record
    assert record["grad_has_nan"] == 0 < record["grad/norm"]
    assert not torch.equal(trainer.model.lm_head.weight, old_weight)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_shadow_is_compared_at_the_same_clipping(tiny, tmp_path, accumulation):
    """The shadow's gradient is clipped as well.

    Else the distance would be larger than the gradient itself.
    """
    overrides = {"shadow__enabled": True, "shadow__interval": 1, "train__max_steps": 2}
    overrides |= {"model__formats": "{'*': {gradient: {weight: E3M4}}}"}
    *_, last = records_of(tiny(**settings_of({}, accumulation, CLIP, **overrides)), tmp_path / "r")
    assert last["grad/clipped"] == 1
    assert last["grad/cosine_min"] > 0.99
    assert last["grad/quant_snr_db"] > 20


STEPS = 6
KEYS = ("step", "train/loss", "grad/norm", "grad/clipped")
RULES = {
    "adamw": {"rule": "stochastic-8bit", "model__format": "E4M3"},
    "muon": {"rule": "muon-stochastic", "model__format": "E4M3"},
    "dropout": {"rule": "stochastic", "model__dropout": 0.3, "model__format": "E4M3"},
    "gradients": {
        "rule": "stochastic",
        "model__formats": "{'*': {weight: E4M3, gradient: {activation: E5M2}}}",
    },
}


def stepped(rule, **overrides):
    return {"optimizer__grad_clip": CLIP, "train__max_steps": STEPS, **RULES[rule], **overrides}


def trained(config):
    """The records of some steps, and the weights after them."""
    trainer, records = trainer_of(config), []
    torch.manual_seed(0)  # of dropout
    for number in range(1, STEPS + 1):
        step = trainer.new_step(number, last=number == STEPS)
        trainer.train_step(step, [])
        records.append({k: v for k, v in step.record.items() if k in KEYS})
    return records, [p.detach().clone() for p in trainer.model.parameters()]


def check_same(plain, within):
    assert plain[0] == within[0]
    assert any(record["grad/clipped"] for record in plain[0])
    assert all(
        torch.equal(one, expected) for one, expected in zip(plain[1], within[1], strict=True)
    )


@pytest.mark.parametrize("rule", RULES)
def test_exact_is_the_plain_loop(rule, tiny):
    within = tiny(**stepped(rule, train__step_in_backward=True, optimizer__clip_by="exact"))
    check_same(trained(tiny(**stepped(rule))), trained(within))


def test_previous_clips_by_the_norm_of_the_step_before(tiny):
    """The first step clips by its own norm, as the plain loop does.

    The records say which steps were clipped.
    """
    plain, _ = trained(tiny(**stepped("adamw")))
    within, _ = trained(
        tiny(**stepped("adamw", train__step_in_backward=True, optimizer__clip_by="previous"))
    )
    assert plain[0] == within[0]
    assert plain[1:] != within[1:]
    norms = [record["grad/norm"] for record in within]
    assert [record["grad/clipped"] for record in within] == [
        int(n > CLIP) for n in [norms[0], *norms[:-1]]
    ]


@pytest.mark.parametrize("clip", [0.0, CLIP])
def test_sums_are_those_of_the_plain_loop_but_for_their_rounding(clip, tiny):
    overrides = {"train__accumulation": 3, "optimizer__grad_clip": clip}
    plain, _ = trained(tiny(**stepped("adamw", **overrides)))
    within, _ = trained(tiny(**stepped("adamw", **overrides, train__step_in_backward=True)))
    assert [record["grad/clipped"] for record in plain] == [
        record["grad/clipped"] for record in within
    ]
    for expected, record in zip(plain, within, strict=True):
        assert record["grad/norm"] == pytest.approx(expected["grad/norm"], rel=0.02)


def test_gradients_of_weights_with_a_format_are_refused(tiny):
    formats = {"*": {"weight": "E4M3", "gradient": {"weight": "E5M2"}}}
    methods = {
        "train__step_in_backward": True,
        "optimizer__clip_by": "exact",
        "model__formats": formats,
    }
    with refusal(r"for a weight's gradient can't be used with train\.step_in_backward"):
        trainer_of(tiny(rule="stochastic", optimizer__grad_clip=CLIP, **methods))


def test_a_model_of_transformers_that_recomputes_takes_two_passes(text_file, tmp_path):
    import causal_models

    model, law = causal_models.write(tmp_path / "llama"), tmp_path / "law"
    assert (
        main(
            [
                "prepare",
                "text",
                "--input",
                str(text_file),
                "--tokenizer",
                str(model),
                "--out",
                str(law),
            ]
        )
        == 0
    )
    settings = {
        "model.pretrained": model,
        "data.dir": law,
        "model.block_size": 16,
        "train.batch_size": 2,
    }
    settings |= {
        "rule": "stochastic-8bit",
        "optimizer.grad_clip": 0.5,
        "train.max_steps": STEPS,
        "train.recompute": True,
    }
    within = ["--train.step_in_backward=true", "--optimizer.clip_by=exact"]
    check_same(
        *(
            trained(load_config(find_config("finetune.yaml"), [*flags(settings), *arguments]))
            for arguments in ([], within)
        )
    )
