"""Adam's first average with a memory that depends on the spacing at a weight.

    python study/benchmarks/momentum_by_stiffness.py --data-dir data/stdlib
                                                     [--formats E4M3,E5M2]
                                                     [--seeds 42,43,44]
                                                     [--powers library,0,0.5,1,-0.5]
                                                     [--beta1 0.9] [--max-steps 300]

Model, batches and schedule are those of ``nanogpt-bench compare``, under its rule
``stiffness``. Each weight's average decays by ``beta_1`` to the power
``(S / S_ref)^-p``. With p above 0 its time constant grows with the spacing S of the
format at the weight. With p = 0 all have that of ``beta_1``. ``library`` is the
library's StiffnessAdamW, which p = 0 repeats with other random bits. The script prints
the final loss of every training, and the paired differences to p = 0 at the end.
"""

import argparse
import itertools
import statistics
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

import fp8manifold as fm
from nanogpt_bench.config.settings import build_config
from nanogpt_bench.data.batches import open_corpus
from nanogpt_bench.loop.trainer import Trainer, trainer_inputs
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.sweep.comparison import row_settings

DAMPING, CLIP = 2.0**-8, 2.0**4
#: bounds of S / S_ref in the time constant: beyond eight times the average no run of a
#: few hundred steps tells it apart
LEAST_RATIO, LARGEST_RATIO = 2.0**-3, 2.0**3
LIBRARY_POWER = "library"


class DecayByStiffness(torch.optim.Optimizer):
    """StiffnessAdamW with k = 1 and a decay of the first average by weight.

    Weights are on a grid of floats. The average is divided by the sum of its gradients'
    weights, as Adam's is by ``1 - beta_1^t``.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], power: float, **defaults: Any) -> None:
        super().__init__(groups, defaults)
        self._power = power

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step(group, weight, weight.grad)

    def _step(self, group: dict[str, Any], weight: Tensor, gradient: Tensor) -> None:
        state = self.state[weight]
        beta1, beta2 = group["betas"]
        if not state:
            state["step"] = 0
            for name in ("first", "sum", "second"):
                state[name] = torch.zeros_like(gradient)
        state["step"] += 1
        manifold = getattr(weight, "manifold", None)
        ratio = torch.ones_like(gradient)
        if manifold is not None:
            stiffness = manifold.stiffness(weight.detach())
            ratio = (stiffness / stiffness.mean()).clamp(DAMPING, CLIP)
        decay = beta1 ** (ratio.clamp(LEAST_RATIO, LARGEST_RATIO) ** -self._power)
        state["first"].mul_(decay).add_((1 - decay) * gradient)
        state["sum"].mul_(decay).add_(1 - decay)
        state["second"].mul_(beta2).add_((1 - beta2) * gradient * gradient)
        root = (state["second"] / (1 - beta2 ** state["step"])).sqrt()
        direction = state["first"] / state["sum"] / (root + group["eps"])
        lr = group["lr"]
        target = weight * (1 - lr * group["weight_decay"]) - lr * ratio * direction
        weight.copy_(target if manifold is None else manifold.round(target))


def final_loss(args: argparse.Namespace, fmt: str, seed: int, power: float | str) -> float:
    """Train, and return the final validation loss."""
    settings = row_settings(
        "stiffness", fmt, seed=seed, max_steps=args.max_steps, data_dir=args.data_dir
    )
    settings |= {
        "model.storage": "grid",
        "optimizer.beta1": args.beta1,
        "shadow.enabled": False,
    }
    config = resolve(build_config(settings))
    trainer = Trainer(trainer_inputs(config, open_corpus(config), torch.device("cpu")))
    if not isinstance(power, str):
        groups = []
        for group in trainer.optimizer.param_groups:
            names = ("params", "lr", "betas", "eps", "weight_decay")
            groups.append({name: group[name] for name in names})
        trainer.optimizer = DecayByStiffness(groups, power)
        manifolds = [layer.manifold for layer in _quantized_layers(trainer.model)]
        assert all(isinstance(manifold, fm.FP8Manifold) for manifold in manifolds)
    for number in range(1, args.max_steps + 1):
        trainer.train_step(trainer.new_step(number, last=number == args.max_steps), [])
    return trainer.validate()


def _quantized_layers(model: torch.nn.Module) -> Iterator[fm.QuantizedLinear]:
    return (module for module in model.modules() if isinstance(module, fm.QuantizedLinear))


def main() -> None:
    """Train, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data-dir", required=True, help="prepared text: nanogpt-bench prepare stdlib"
    )
    parser.add_argument("--formats", default="E4M3,E5M2")
    parser.add_argument("--seeds", default="42,43,44")
    parser.add_argument(
        "--powers", default=f"{LIBRARY_POWER},0,0.5,1,-0.5", help="exponents p, or library"
    )
    parser.add_argument("--beta1", type=float, default=0.9)
    parser.add_argument("--max-steps", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    powers = [word if word == LIBRARY_POWER else float(word) for word in args.powers.split(",")]
    losses: dict[tuple[str, float | str], list[float]] = {}
    seeds = list(map(int, args.seeds.split(",")))
    for seed, fmt, power in itertools.product(seeds, args.formats.split(","), powers):
        loss = final_loss(args, fmt, seed, power)
        losses.setdefault((fmt, power), []).append(loss)
        print(f"{fmt} seed {seed} p {power} beta1 {args.beta1:g}: {loss:.4f}", flush=True)
    for (fmt, power), by_seed in losses.items():
        line = f"{fmt} p {power}: {statistics.mean(by_seed):.4f}"
        without_power = losses.get((fmt, 0.0))
        if without_power:
            pairs = zip(by_seed, without_power, strict=True)
            differences = [f"{loss - plain_loss:+.4f}" for loss, plain_loss in pairs]
            line += f", less p 0: {', '.join(differences)}"
        print(line)


if __name__ == "__main__":
    main()
