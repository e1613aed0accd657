"""One step of every optimizer, one weight at a time, in scalar float32 arithmetic.

Written from the docstrings; nothing of the library's arithmetic is used. Numbers are
NumPy float32 scalars, so every operation rounds once, in the documented order; codes
are Python ints. Random words come from the library's counter, which has tests of its
own.
"""

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
from scalar_grid import F32, Chart, Codes, exp2, exponent_of, f32, log2_of_mantissa, root

import fp8manifold as fm
from fp8manifold.random_bits import word_range


@dataclass
class Weight:
    """One weight within a step: its value and its ULP in units of the scale, and the scale."""

    x: F32
    ulp: F32
    scale: F32

    @property
    def inverse(self):
        return f32(f32(1) / self.scale)


@dataclass
class Descent:
    """What a gradient gives for one weight: the direction, and the averages to store.

    `denominator` and `root` are Adam's: what it divides by, and the root of `exp_avg_sq`.
    """

    direction: F32
    averages: dict[str, F32]
    denominator: F32 | None = None
    root: F32 | None = None


@dataclass
class Slow:
    """The slow definition: an optimizer on one parameter, what it stores, and :meth:`step`.

    ``stored`` holds codes, or float32 weights where ``storage`` is ``grid``, ``free``
    or ``plain``.
    """

    kind: str
    fmt: fm.FloatFormat
    shape: tuple[int, ...]
    scales: list[float]
    stored: list[Any]
    options: dict[str, Any]
    storage: str = "codes"
    stream: int = 0
    #: The place of the scale of every weight.
    groups: list[int] = field(default_factory=list)
    #: Whether all weights have one scale.
    one_scale: bool = False
    #: Elements of a block of the averages; 0 for a row.
    block: int = 0
    residual: list[int] = field(default_factory=list)
    averages: dict[str, list[Any]] = field(default_factory=dict)
    bounds: dict[str, list[F32]] = field(default_factory=dict)
    steps: int = 0
    reference: float = 0.0
    #: The unit of the gradient with respect to codes.
    unit: float = 1.0

    def __post_init__(self):
        defaults = {
            "betas": (0.9, 0.95),
            "momentum": 0.0,
            "dampening": 0.0,
            "nesterov": False,
            "weight_decay": 0.0,
            "eps": 1e-8,
            "stiffness": 0.0,
            "damping": 2.0**-8,
            "clip": 16.0,
            "refresh_every": 100,
            "seed": 0,
            "writeback": "stochastic",
            "moments": "float32",
            "maximize": False,
            "amsgrad": False,
            "retraction": "exponential",
        }
        assert not self.options.keys() - defaults.keys() - {"lr"}, self.options
        self.options = defaults | self.options
        n = len(self.stored)
        self.rounds = self.storage in ("codes", "grid")
        self.riemannian = self.kind.startswith("Riemannian")
        kinds = {
            "StiffnessLion": "lion",
            "StiffnessSGD": "sgd",
            "RiemannianSGD": "sgd",
        }
        self.direction = kinds.get(self.kind, "adam")
        self.rule = fm.optim.WRITEBACKS[self.options["writeback"]]
        self.extra = self.rule.residual_bits if self.rounds else 0
        self.residual = self.residual or [0] * n
        zero = 0 if self.options["moments"] == "8bit" else f32(0)
        self.averages = {name: [zero] * n for name in self.names}
        self.block = self.block or n // (self.shape[0] if len(self.shape) > 1 else 1)
        self.bounds = {name: [f32(0)] * (n // self.block) for name in self.names}

    @property
    def names(self):
        if self.direction == "sgd":
            return ("momentum_buffer",) if self.options["momentum"] else ()
        if self.options["amsgrad"]:
            return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        return {"adam": ("exp_avg", "exp_avg_sq"), "lion": ("exp_avg",)}[self.direction]

    def weight(self, i):
        scale = f32(self.scales[i])
        stored = self.stored[i]
        if self.storage == "plain":
            return Weight(f32(stored), f32(0), scale)
        if self.storage == "free":
            x = f32(f32(stored) / scale)
            chart = Chart(self.fmt.mantissa_bits, self.fmt.emin, self.fmt.emax)
            return Weight(x, chart.stiffness(x), scale)
        coarse, fine = Codes(self.fmt), Codes(self.fmt, self.extra)
        if self.storage == "grid":
            # A division by no power of two leaves a point of the grid a hair off it.
            x = f32(f32(stored) / scale)
            stored = coarse.code(coarse.round(float(x), None), bool(np.signbit(x)))
        count = (coarse.signed(stored) << self.extra) + (self.residual[i] if self.extra else 0)
        x = f32(fine.value(count))
        if count == 0 and not self.extra and stored & self.fmt.sign_bit:
            x = f32(-0.0)
        return Weight(x, f32(fine.step_at(count) * 2**self.extra), scale)

    def average(self, name, i):
        stored = self.averages[name][i]
        if self.options["moments"] != "8bit":
            return f32(stored)
        squared, e4m3 = name == "exp_avg_sq", Codes(fm.FloatFormat(4, 3))
        scale = f32(2.0 ** self._scale_exponent(self.bounds[name][i // self.block], squared))
        value = f32(f32(e4m3.value(stored if squared else e4m3.signed(stored))) * scale)
        if stored == e4m3.fmt.sign_bit:
            value = f32(-0.0)
        return f32(value * value) if squared else value

    @staticmethod
    def _scale_exponent(bound, squared):
        """Return the exponent of the scale that takes a bound, or its root, to 2^6 .. 2^7."""
        exponent = exponent_of(float(bound)) if bound >= f32(2.0**-126) else -127
        return exponent // 2 - 6 if squared else max(exponent - 6, -126)

    def step(self, gradient):
        options, n = self.options, len(self.stored)
        if self.storage != "plain" and self.steps % options["refresh_every"] == 0:
            if self.steps and self.storage == "codes":
                self._narrow()
            self._refresh()
        self.steps += 1
        self.numbers = self._numbers()
        words = (options["seed"], self.steps, self.stream)
        draws = fm.random_bits(n, seed=words[0], step=words[1], stream=words[2]).tolist()
        noise = [w % 2**32 for w in word_range(0, n, (*words, 1), "cpu").tolist()]
        weights = [self.weight(i) for i in range(n)]
        gradients = [self._gradient(f32(g), w) for g, w in zip(gradient, weights, strict=True)]
        averages = [{name: self.average(name, i) for name in self.names} for i in range(n)]
        self._advance_bounds(gradients)
        descents = [self._descend(g, old) for g, old in zip(gradients, averages, strict=True)]
        targets = [
            self._move(weight, d.direction) for weight, d in zip(weights, descents, strict=True)
        ]
        fitted = self._fitted(targets)
        for i, (weight, descent, target) in enumerate(zip(weights, descents, targets, strict=True)):
            ratio = f32(self.scales[i] / fitted[i])
            stored_value = f32(self._store(i, weight, f32(target * ratio), draws[i]) / ratio)
            if self.rule.injects and self.rounds:
                self._inject(weight, descent, target, stored_value)
            self._keep(i, descent, noise[i])
        changed, self.scales = fitted != self.scales, fitted
        if changed and (self.one_scale or options["stiffness"] != 0.0):
            self._refresh()
        if self._widen() and self.one_scale:
            self._refresh()

    def _refresh(self):
        self.reference = self._mean_stiffness()
        self._change_unit()

    def _under_each_scale(self, values):
        """The largest magnitude, in value, of each entry of the scale; NaN counts as 0."""
        largest = {}
        for group, value, scale in zip(self.groups, values, self.scales, strict=True):
            value_here = 0.0 if math.isnan(value) else abs(float(value)) * scale
            largest[group] = max(largest.get(group, 0.0), value_here)
        return largest

    def _fresh_scale(self, largest, headroom, scale):
        """Return a scale with the mantissa of the old one and room above the largest.

        The room is that of `fm.storage_scale`, of which ``headroom`` is the least.
        """
        room = min(16.0, max(headroom, self.fmt.max / (8 * self.fmt.min_normal)))
        top = min(self.fmt.max / room, self.fmt.ulp_min * 2.0**40)
        factor = math.frexp(scale)[0] * 2
        mantissa, exponent = math.frexp(f32(f32(largest) / f32(top * factor)))
        return 2.0 ** (exponent - (mantissa == 0.5)) * factor

    def _fitted(self, targets):
        """Return new scales: those of weights that all are 0 suit their targets.

        Where steps are counted in spacings all scales stay.
        """
        if self.storage != "codes" or self.riemannian:
            return self.scales
        # 0x80 is -0, or NaN in a format without -0: both count as 0.
        largest_stored = self._under_each_scale(
            [self.fmt.decode_code(c) if c != 0x80 else 0.0 for c in self.stored]
        )
        nan = {
            g
            for g, c in zip(self.groups, self.stored, strict=True)
            if math.isnan(self.fmt.decode_code(c))
        }
        asked = self._under_each_scale([float(t) for t in targets])
        new = []
        for group, scale in zip(self.groups, self.scales, strict=True):
            if largest_stored[group] == 0 and group not in nan and asked[group] > 0:
                fresh = self._fresh_scale(asked[group], 2.0, scale)
                beyond = asked[group] >= scale * (self.fmt.max + self.fmt.ulp_max / 2)
                scale = fresh if beyond or 16 * fresh <= scale else scale
            new.append(scale)
        return new

    def _narrow(self):
        """Bring scales down that are 16 times as large as fresh ones; values stay."""
        largest_stored, new = (
            self._under_each_scale([self.fmt.decode_code(c) for c in self.stored]),
            [],
        )
        for group, scale in zip(self.groups, self.scales, strict=True):
            fresh = (
                self._fresh_scale(largest_stored[group], 1.0, scale)
                if largest_stored[group]
                else scale
            )
            new.append(fresh if 16 * fresh <= scale else scale)
        for i, scale in enumerate(new):
            if scale != self.scales[i]:
                x = float(self.weight(i).x) * self.scales[i] / scale
                self._put(
                    i, Codes(self.fmt, self.extra).round(x, 0), math.copysign(1.0, x) < 0, f32(1)
                )
        self.scales = new

    def _widen(self):
        """Double scales that have a weight at the last code, and round their weights anew.

        The rounding is stochastic. Return whether any scale doubled.
        """
        if self.storage != "codes" or self.fmt.max_code not in [
            c & (self.fmt.sign_bit - 1) for c in self.stored
        ]:
            return False
        n, old, words = (
            len(self.stored),
            self.scales,
            (self.options["seed"], self.steps, self.stream),
        )
        draws = [w % 2**32 >> 8 for w in word_range(0, n, (*words, 2), "cpu").tolist()]
        amax = {}
        for i, code in enumerate(self.stored):
            value = abs(self.fmt.decode_code(code))
            amax[self.groups[i]] = max(
                amax.get(self.groups[i], 0.0), 0.0 if math.isnan(value) else value * old[i]
            )
        new = [
            s * 2 if amax[g] >= s * self.fmt.max else s
            for s, g in zip(old, self.groups, strict=True)
        ]
        for i, draw in enumerate(draws):
            if new[i] == old[i]:
                continue
            x = float(self.weight(i).x) * old[i] / new[i]
            self._put(
                i, Codes(self.fmt, self.extra).round(x, draw), math.copysign(1.0, x) < 0, f32(1)
            )
        self.scales = new
        return True

    def _mean_stiffness(self):
        """Return the mean over the codes, without their residuals."""
        extra, self.extra = self.extra, 0
        weights = [self.weight(i) for i in range(len(self.stored))]
        self.extra = extra
        return float(sum(Fraction(float(f32(w.ulp * w.scale))) for w in weights) / len(weights))

    def _change_unit(self):
        """Set the unit: a power of two above the chart's bound, or next to S_ref.

        Averages and bounds follow exactly.
        """
        if self.kind != "RiemannianAdam":
            return
        old, bound = self.unit, self.options["clip"] * self.reference
        self.unit = 2.0 ** (
            math.ceil(math.log2(bound)) + 1 if math.isfinite(bound) else exponent_of(self.reference)
        )
        for name in self.names:
            ratio = (old / self.unit) ** (1 if name == "exp_avg" else 2)
            if self.options["moments"] != "8bit":
                self.averages[name] = [f32(float(x) * ratio) for x in self.averages[name]]
            self.bounds[name] = [f32(float(x) * ratio) for x in self.bounds[name]]

    def _numbers(self):
        o, t = self.options, self.steps
        lr, beta1, beta2 = o["lr"], *o["betas"]
        keep = 1 - lr * o["weight_decay"]
        eps, k = o["eps"], o["stiffness"](t - 1) if callable(o["stiffness"]) else o["stiffness"]
        if self.riemannian:
            keep, eps = 1 - o["weight_decay"], eps * self.reference / self.unit
        numbers = {
            "rate": lr,
            "keep": keep,
            "k": k,
            "beta1": beta1,
            "beta2": beta2,
            "gain1": 1 - beta1,
        }
        numbers |= {"gain2": 1 - beta2, "eps": eps}
        if self.direction == "sgd":
            beta1 = numbers["beta1"] = o["momentum"]
            numbers["gain1"] = 1.0 if t == 1 else 1 - o["dampening"]
        if self.direction == "adam":
            correction = math.sqrt(1 - beta2**t)
            numbers["eps"] = eps * correction
            numbers["rate"] = lr * correction / (1 - beta1**t)
        if beta1:
            numbers["inject"] = (1 - beta1) / beta1 / numbers["rate"]
        return numbers

    def n(self, name):
        """Return a number of this step, rounded once from float64; eps is never 0."""
        return f32(max(self.numbers[name], 2.0**-126) if name == "eps" else self.numbers[name])

    def _chart(self, scale):
        """Return the format's chart between powers of two that bound S / S_ref."""
        m, shift = self.fmt.mantissa_bits, exponent_of(float(scale))
        lowest, highest = self.fmt.emin, self.fmt.emax
        if self.options["damping"]:
            lowest = max(
                lowest, math.floor(math.log2(self.options["damping"] * self.reference)) + m - shift
            )
        if math.isfinite(self.options["clip"]):
            highest = min(
                highest, math.ceil(math.log2(self.options["clip"] * self.reference)) + m - shift
            )
        return Chart(m, lowest, max(highest, lowest))

    def _gradient(self, g, weight):
        g = -g if self.options["maximize"] else g
        scale = f32(weight.scale * f32(1 / self.unit))
        return (
            f32(g * f32(self._chart(weight.scale).stiffness(weight.x) * scale))
            if self.riemannian
            else g
        )

    def _advance_bounds(self, gradients):
        if self.options["moments"] != "8bit":
            return
        for name in self.names:
            number = "2" if name == "exp_avg_sq" or self.direction == "lion" else "1"
            for b in range(len(self.bounds[name])):
                largest = max(abs(g) for g in gradients[b * self.block : (b + 1) * self.block])
                largest = f32(largest * largest) if name == "exp_avg_sq" else largest
                decayed = f32(self.bounds[name][b] * self.n("beta" + number))
                gain = abs(self.n("gain" + number))
                self.bounds[name][b] = f32(decayed + f32(gain * largest))

    def _descend(self, g, old):
        blend = lambda a, n: f32(f32(a * self.n("beta" + n)) + f32(g * self.n("gain" + n)))  # noqa: E731
        if self.direction == "lion":
            mixed = blend(old["exp_avg"], "1")
            return Descent(f32(np.sign(mixed)), {"exp_avg": blend(old["exp_avg"], "2")})
        if self.direction == "sgd":
            if not old:
                return Descent(g, {})
            buffer = blend(old["momentum_buffer"], "1")
            ahead = f32(g + f32(buffer * self.n("beta1")))
            return Descent(
                ahead if self.options["nesterov"] else buffer, {"momentum_buffer": buffer}
            )
        second = f32(f32(old["exp_avg_sq"] * self.n("beta2")) + f32(f32(g * self.n("gain2")) * g))
        new = {"exp_avg": blend(old["exp_avg"], "1"), "exp_avg_sq": second}
        under = second
        if "max_exp_avg_sq" in old:
            under = new["max_exp_avg_sq"] = max(old["max_exp_avg_sq"], second)
        denominator = f32(root(under) + self.n("eps"))
        return Descent(f32(new["exp_avg"] / denominator), new, denominator, root(second))

    def _factor(self, weight):
        k, stiffness, o = self.numbers["k"], f32(weight.ulp * weight.scale), self.options
        if k == 0 and not callable(o["stiffness"]):
            return None
        if callable(o["stiffness"]) or k not in (0.5, 1, 2):
            low = math.log2(o["damping"]) if o["damping"] else -1e4
            high = 1e4 if math.isinf(o["clip"]) else math.log2(o["clip"])
            reference = f32(f32(math.log2(self.reference)) - log2_of_mantissa(weight.scale))
            logarithm = f32(f32(exponent_of(float(stiffness))) - reference)
            return exp2(f32(min(max(logarithm, f32(low)), f32(high)) * f32(k)))
        ratio = min(
            max(f32(stiffness * f32(1 / self.reference)), f32(o["damping"])), f32(o["clip"])
        )
        if k == 0.5:
            return root(ratio)
        return f32(ratio * ratio) if k == 2 else ratio

    def _move(self, weight, direction):
        start = f32(weight.x * self.n("keep")) if self.options["weight_decay"] else weight.x
        rate, top = self.n("rate"), f32(self.fmt.max)
        if self.storage == "plain":
            return f32(start - f32(direction * rate))
        if self.riemannian:
            steps = min(max(f32(direction * -rate), f32(-(2.0**24))), f32(2.0**24))
            chart = self._chart(weight.scale)
            if self.options["retraction"] == "euclidean":
                moved = f32(start + f32(steps * chart.stiffness(start)))
            else:
                moved = start if steps == 0 else chart.shift(start, steps)
            return min(max(moved, -top), top)
        factor = self._factor(weight)
        if factor is not None:
            direction = f32(direction * factor)
        return f32(start - f32(direction * f32(rate * weight.inverse)))

    def _store(self, i, weight, target, draw):
        """Round once, and return what is stored, in units of the scale."""
        if self.storage == "plain":
            self.stored[i] = target
            return target
        if self.storage == "free":
            x = min(max(target, f32(-self.fmt.max)), f32(self.fmt.max))
            # A weight that stays is not rounded again by the scale.
            if x != weight.x:
                self.stored[i] = f32(x * weight.scale)
            return x
        count = Codes(self.fmt, self.extra).round(float(target), draw if self.rule.draws else None)
        return self._put(i, count, bool(np.signbit(target)), weight.scale)

    def _put(self, i, count, negative, scale):
        """Store a count of steps of the finer grid, and its residual.

        A code of NaN stays.
        """
        coarse = Codes(self.fmt)
        code = coarse.code(count, negative)
        if self.extra:
            signed = -count if negative else count
            nearest = math.floor(Fraction(signed, 2**self.extra) + Fraction(1, 2))
            self.residual[i] = signed - (nearest << self.extra)
            code = coarse.code(nearest, nearest < 0)
            if nearest == 0 and self._is_negative_zero(self.stored[i]):
                code = self.fmt.sign_bit
        value = f32(coarse.value(coarse.signed(code)))
        value = f32(-0.0) if value == 0 and code & self.fmt.sign_bit else value
        if self.storage == "grid":
            self.stored[i] = f32(value * scale)
        elif not math.isnan(self.fmt.decode_code(self.stored[i])):
            self.stored[i] = code
        return value

    def _is_negative_zero(self, stored):
        if self.storage == "grid":
            return np.signbit(stored) and stored == 0
        return stored == self.fmt.sign_bit

    def _inject(self, weight, descent, target, stored_value):
        if self.riemannian:
            chart = self._chart(weight.scale)
            error = f32(chart.forward(target) - chart.forward(stored_value))
        else:
            error = f32(f32(target - stored_value) / weight.inverse)
            factor = self._factor(weight)
            if factor is not None:
                error = f32(error / factor)
        if descent.denominator is not None:
            error = f32(error * descent.denominator)
        name = self.names[0]
        descent.averages[name] = f32(descent.averages[name] - f32(error * self.n("inject")))

    def _keep(self, i, descent, noise):
        """Store averages in float32, or rounded by one half of a random word."""
        moments = self.options["moments"]
        for (name, value), draw in zip(
            descent.averages.items(), (noise & 0xFFFF, noise >> 16, 0), strict=False
        ):
            if moments == "bfloat16":
                bits = (int(value.view(np.uint32)) + draw) & 0xFFFF0000
                value = np.uint32(bits % 2**32).view(np.float32)
            elif moments == "8bit":
                is_root = name == "exp_avg_sq"
                value = (
                    self._root_code(i, descent.root, noise >> 8)
                    if is_root
                    else self._code(name, i, value, draw)
                )
            self.averages[name][i] = value

    def _code(self, name, i, value, draw):
        e4m3 = Codes(fm.FloatFormat(4, 3))
        inverse = f32(2.0 ** -self._scale_exponent(self.bounds[name][i // self.block], False))
        return e4m3.code(
            e4m3.round(float(f32(value * inverse)), draw << 8 | 0x80), bool(np.signbit(value))
        )

    def _root_code(self, i, value, draw):
        """Return the code below or above a root, never 0 but for 0.

        The odds of the one above make 1 over the root right in the mean.
        """
        assert value is not None
        e4m3 = Codes(fm.FloatFormat(4, 3))
        inverse = f32(
            2.0 ** -self._scale_exponent(self.bounds["exp_avg_sq"][i // self.block], True)
        )
        r = min(f32(value * inverse), f32(e4m3.fmt.max))
        below = max(n for n in range(e4m3.fmt.max_code + 1) if e4m3.value(n) <= r)
        whole, part = divmod(Fraction(float(r)) / Fraction(e4m3.step_at(below)), 1)
        part, unit = f32(float(part)), f32(4 * whole + 2)  # neither of them rounds
        odds = f32(part * f32(unit + f32(f32(1) - part)))
        return max(below + int(f32(f32(draw * 2.0**-24) * unit) < odds), int(value > 0))
