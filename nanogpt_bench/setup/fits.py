"""Ways of training all weights of a language model, and the memory that each takes.

The bytes are `fm.memory_needed`'s. A `TrainingWay` is a line of a table: `WAYS` has
those of other libraries and those of this one, each with the loss from all logits and in
chunks of tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import fp8manifold as fm

#: tokens of a chunk of the loss
CHUNK: Final = 256
#: bytes of a card of so many GB, which are GiB
GIB: Final = 2**30
#: what a process takes beside the tensors: a share for what the allocator has reserved
#: and not used, and bytes for the context and the kernels' code
RESERVED_SHARE: Final = 1.05
CONTEXT_BYTES: Final = 0.5e9
#: millions of weights: a language model that is published, and the study's small one
LARGEST_MEASURED: Final = 135.0
SMALL_MEASURED: Final = 0.86


@dataclass(frozen=True)
class TrainingWay:
    """A way of training."""

    name: str
    #: of `fm.memory_needed`
    options: Mapping[str, Any]
    #: the line of code that makes its optimizer; "" for one that is not of this library
    optimizer_line: str = ""
    #: millions of weights of the largest model whose loss in fine-tuning README has
    measured_millions: float = 0.0
    #: of its weights and embeddings, in the lines of code
    weight_format: str = "E4M3"
    chunked: bool = False

    @property
    def has_measured_loss(self) -> bool:
        """Whether its loss was measured for a model as large as any."""
        return self.measured_millions == LARGEST_MEASURED

    @property
    def is_ours(self) -> bool:
        """Whether the library's optimizer steps weights in codes."""
        return bool(self.optimizer_line)

    def needed(self, config: Any, **sizes: Any) -> fm.MemoryNeeded:
        """Return the memory that it needs; `sizes` are of `fm.memory_needed`, too."""
        return fm.memory_needed(
            config, **self.options, chunk=CHUNK if self.chunked else None, **sizes
        )


def _floats(
    optimizer: str, *, dtype: str = "bfloat16", in_backward: bool = False
) -> dict[str, Any]:
    return {
        "optimizer": optimizer,
        "storage": "float",
        "dtype": dtype,
        "in_backward": in_backward,
    }


_ADAMW: Final = 'fm.optim.StiffnessAdamW(model.parameters(), lr=5e-5, moments="8bit")'
_MUON: Final = 'fm.optim.StiffnessMuon.for_model(model, lr=2e-4, other_lr=5e-5, moments="8bit")'
_LION: Final = 'fm.optim.StiffnessLion(model.parameters(), lr=1e-5, moments="8bit")'
_ADAFACTOR: Final = "fm.optim.StiffnessAdafactor(model.parameters(), lr=5e-4)"

BASIC_WAYS: Final = (
    TrainingWay("float32, torch AdamW", _floats("torch_adamw", dtype="float32")),
    TrainingWay("bfloat16, torch AdamW", _floats("torch_adamw")),
    TrainingWay("bfloat16, 8-bit AdamW", _floats("adamw8bit")),
    TrainingWay(
        "bfloat16, 8-bit AdamW, steps in backward",
        _floats("adamw8bit", in_backward=True),
        measured_millions=SMALL_MEASURED,
    ),
    TrainingWay(
        "bfloat16 stochastic, Adafactor, steps in backward",
        _floats("adafactor", in_backward=True),
        measured_millions=LARGEST_MEASURED,
    ),
    TrainingWay("one byte, AdamW", {"optimizer": "adamw", "in_backward": False}, _ADAMW),
    TrainingWay(
        "one byte, AdamW, steps in backward", {"optimizer": "adamw"}, _ADAMW, LARGEST_MEASURED
    ),
    TrainingWay(
        "one byte, Muon, steps in backward", {"optimizer": "muon"}, _MUON, LARGEST_MEASURED
    ),
    TrainingWay("one byte, Lion, steps in backward", {"optimizer": "lion"}, _LION, SMALL_MEASURED),
    TrainingWay(
        "one byte, Adafactor, steps in backward",
        {"optimizer": "adafactor"},
        _ADAFACTOR,
        LARGEST_MEASURED,
        # E4M3 costs it 0.06 with 135 million weights: Q27 of the study
        weight_format="E2M5",
    ),
)


def ways() -> list[TrainingWay]:
    """Return the ways of training, each without and with the loss in chunks."""
    listed = []
    for way in BASIC_WAYS:
        listed += [way, replace(way, chunked=True)]
    return listed


@dataclass(frozen=True)
class Fit:
    """A way of training, and the memory of a model under it."""

    way: TrainingWay
    needed: fm.MemoryNeeded = field(compare=False)

    def fits(self, gigabytes: float) -> bool:
        """Return whether a card of so many GB has the memory, allocator and context too."""
        return RESERVED_SHARE * self.needed.peak + CONTEXT_BYTES <= gigabytes * GIB


def best_first(config: Any, ways: Iterable[TrainingWay], **sizes: Any) -> list[Fit]:
    """Return the ways from the one that needs least on."""
    fits = [Fit(way, way.needed(config, **sizes)) for way in ways]
    return sorted(fits, key=lambda fit: fit.needed.peak)


def smallest_of_ours(
    fits: Sequence[Fit], gigabytes: float, optimizer: str | None = None
) -> Fit | None:
    """Return the way of this library that needs least, if a card has the memory.

    With `optimizer`, a name of `fm.memory_needed`, it is the least by that optimizer.
    """
    for fit in fits:
        is_asked_for = optimizer in (None, fit.way.options["optimizer"])
        if fit.way.is_ours and is_asked_for:
            return fit if fit.fits(gigabytes) else None
    return None


def smallest_measured(fits: Sequence[Fit], gigabytes: float) -> Fit | None:
    """Return the way of least memory whose loss was measured best, if a card has the memory."""
    for fit in fits:
        if fit.way.has_measured_loss:
            return fit if fit.fits(gigabytes) else None
    return None


def lines_of_code(
    way: TrainingWay,
    model: str,
    *,
    experts: bool,
    checkpointing: bool,
    is_in_codes: bool = False,
    dtype: str = "bfloat16",
) -> str:
    """Return Python that trains a model of transformers this way.

    A model that is in codes already keeps its formats.
    """
    options = [f'"{model}"']
    if not is_in_codes:
        fmt = way.weight_format
        options += [f'"{fmt}"', 'tied="leave"', f'embeddings="{fmt}"']
    if experts and not is_in_codes:
        options.append('parameters="*.experts.*"')
    options.append(f"dtype=torch.{dtype}")
    lines = [
        "import torch, fp8manifold as fm",
        "",
        f"model = fm.load({', '.join(options)})",
        'model.to("cuda").train()',
    ]
    if checkpointing:
        lines.append("model.activation_checkpointing_enable()")
    if way.chunked:
        lines.append(f"fm.huggingface.chunked_loss(model, tokens={CHUNK})")
    lines.append(f"optimizer = {way.optimizer_line}")
    if way.options.get("in_backward", True):
        lines.append(
            "handle = fm.optim.step_in_backward(\n"
            '    optimizer, clip="previous", max_norm=1.0, first="measure"\n'
            ")"
        )
    lines += [
        "for tokens in batches:",
        "    model(input_ids=tokens, labels=tokens).loss.backward()",
        "    optimizer.step()",
        "    optimizer.zero_grad()",
    ]
    return "\n".join(lines)
