"""The configuration of one training run: every setting is declared here, once.

YAML files, command-line overrides (`--train.max_steps 100`), `run --defaults` and the
resolved `config.yaml` of a run folder are all derived from the fields below. A field's
metadata says what values it takes.
"""

from enum import StrEnum
from typing import Any

from nanogpt_bench.config.field import SettingsSection, section, setting
from nanogpt_bench.config.metrics import MonitorConfig


class Storage(StrEnum):
    """The values of `model.storage`: where the weights of linear layers live.

    A configuration has the plain word, which is equal to the member.
    """

    FLOAT32 = "float32"
    MASTER = "master"
    GRID = "grid"
    CODES = "codes"
    CONTINUOUS = "continuous"
    #: another package's
    PEER = "peer"


class OptimizerName(StrEnum):
    """The values of `optimizer.name`.

    A configuration has the plain word here, too, and so do the rules.
    """

    # torch's, and on the library's manifolds those of the library with k = 0
    ADAMW = "adamw"
    SGD = "sgd"
    # another package's
    TORCHAO_ADAMW8BIT = "torchao_adamw8bit"
    TORCHAO_ADAMWFP8 = "torchao_adamwfp8"
    # the library's own: a name without its underscores is a class of fp8manifold.optim
    STIFFNESS_ADAMW = "stiffness_adamw"
    STIFFNESS_SGD = "stiffness_sgd"
    STIFFNESS_MUON = "stiffness_muon"
    STIFFNESS_LION = "stiffness_lion"
    STIFFNESS_ADAFACTOR = "stiffness_adafactor"
    RIEMANNIAN_ADAM = "riemannian_adam"
    RIEMANNIAN_SGD = "riemannian_sgd"
    FISHER = "fisher"


class Task(StrEnum):
    """The values of `task`."""

    #: predict the next token
    LANGUAGE = "language"
    #: predict a document's labels
    CLASSIFY = "classify"


class Precision(StrEnum):
    """The values of `train.precision`."""

    FLOAT32 = "float32"
    #: autocast
    BF16_MIXED = "bf16-mixed"
    #: weights and optimizer state in bfloat16
    BF16_PURE = "bf16-pure"


class WandbMode(StrEnum):
    """The values of `tracking.wandb`."""

    OFF = "off"
    #: online with an API key, otherwise offline
    AUTO = "auto"
    OFFLINE = "offline"
    ONLINE = "online"


#: torch's own optimizers
TORCH_OPTIMIZERS = (OptimizerName.ADAMW, OptimizerName.SGD)
#: optimizers of other packages, for float weights or for those packages' own weights
PEERS = (OptimizerName.TORCHAO_ADAMW8BIT, OptimizerName.TORCHAO_ADAMWFP8)
_ADAM: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
_SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}
_EXPONENT: dict[str, Any] = {"stiffness": 0.0, "stiffness_end": None, "stiffness_schedule": None}
#: the options that each optimizer takes, with their defaults; others are refused. A
#: rule's rates replace these
OPTIONS: dict[str, dict[str, Any]] = {
    OptimizerName.ADAMW: _ADAM,
    OptimizerName.SGD: _SGD,
    OptimizerName.TORCHAO_ADAMW8BIT: _ADAM,
    OptimizerName.TORCHAO_ADAMWFP8: _ADAM,
    OptimizerName.STIFFNESS_ADAMW: {**_ADAM, **_EXPONENT},
    OptimizerName.STIFFNESS_SGD: {**_SGD, **_EXPONENT},
    OptimizerName.STIFFNESS_MUON: {
        **_ADAM,
        **_EXPONENT,
        "momentum": 0.95,
        "lr": 4e-3,
        "float_lr": 4e-3,
    },
    OptimizerName.STIFFNESS_LION: {**_ADAM, **_EXPONENT, "lr": 2.5e-4},
    OptimizerName.STIFFNESS_ADAFACTOR: {
        **_EXPONENT,
        "lr": 0.05,
        "momentum": 0.0,
        # as torch's: its rates are some twenty times AdamW's, and a decay is multiplied by them
        "weight_decay": 0.0,
    },
    OptimizerName.RIEMANNIAN_ADAM: {**_ADAM, "lr": 0.5, "float_lr": 1e-3, "retraction": None},
    OptimizerName.RIEMANNIAN_SGD: {**_SGD, "lr": 2e4, "float_lr": 0.1, "retraction": None},
    OptimizerName.FISHER: {**_ADAM, **_EXPONENT, "momentum": 0.9},
}
#: the library's own optimizers
OWN_OPTIMIZERS = tuple(
    name.value for name in OptimizerName if name not in (*TORCH_OPTIMIZERS, *PEERS)
)
#: names of the options, of which each optimizer takes some
OPTION_NAMES = tuple(sorted(set().union(*OPTIONS.values())))
#: optimizers that can also step weights on geoopt's manifolds
RIEMANNIAN = (OptimizerName.RIEMANNIAN_ADAM, OptimizerName.RIEMANNIAN_SGD)
STORAGES = tuple(storage.value for storage in Storage)
#: storages that take no format of the library
WITHOUT_FORMATS = (Storage.FLOAT32, Storage.PEER)
#: torchao's int8 weights
TORCHAO_INT8 = "torchao-int8"
#: weights of other packages, and the optimizers that step them
PEER_WEIGHTS = {TORCHAO_INT8: PEERS}
#: storages in which a weight is always a value of its format: a step is rounded as it
#: is written back
ROUNDED = (Storage.GRID, Storage.CODES)
#: storages on the library's manifolds, which its optimizers step. Continuous storage is
#: not rounded
MANIFOLDS = (*ROUNDED, Storage.CONTINUOUS)
#: optimizers of the library that also step float weights, as their own baseline
ON_FLOATS = (
    OptimizerName.STIFFNESS_ADAMW,
    OptimizerName.STIFFNESS_MUON,
    OptimizerName.STIFFNESS_ADAFACTOR,
)
#: what multiplies weights unless a setting says it: their values, as floats
DECODED = "decoded"
#: values of `products` of fp8manifold.LayerSpec, and the formats that FP8 hardware
#: multiplies
PRODUCTS = (DECODED, "fp8", "int8", "auto")
FP8_FORMATS = ("E4M3", "E5M2")
#: names of fp8manifold.optim.WRITEBACKS, which is not imported since it imports torch
WRITEBACKS = ("nearest", "stochastic", "residual8", "momentum")
#: write-backs under which a small step is lost for good
LOSING = ("nearest",)
MOMENTS = ("float32", "bfloat16", "8bit")
#: schedules of an option from its first value to its last
COURSES = ("linear", "cosine", "step")
#: in place of a weight format: the layer stays in float
NO_FORMAT = "none"
#: the folder in which `prepare stdlib` writes, and from which a run reads by default
DEFAULT_DATA_DIR = "data/stdlib"


class DataConfig(SettingsSection):
    """Settings of the text."""

    dir: str = setting(
        DEFAULT_DATA_DIR,
        "folder with train.bin, val.bin and meta.json (see prepare)",
        changes_numbers=False,
        is_folder=True,
        of_task=True,
    )
    train_tokens: int | None = setting(
        None,
        "train on the first N tokens of the corpus only; null: on all of them",
        minimum=1,
        of_task=True,
    )


class ModelConfig(SettingsSection):
    """Settings of the model and of the formats of its layers."""

    size: str | None = setting(
        None,
        "a named size, for the sizes that are not given below; 124M is GPT-2's; null: 0.8M, or "
        "the size of init_from or pretrained",
        choices=("0.8M", "10M", "50M", "124M"),
        of_task=True,
    )
    init_from: str | None = setting(
        None,
        "weights to start from: a run's folder (its newest checkpoint is taken), one of its "
        "checkpoints, or a GPT-2 checkpoint in Hugging Face's layout (config.json and "
        "model.safetensors): its folder, an id on the hub, or gpt2, gpt2-medium, gpt2-large, "
        "gpt2-xl; null: random weights",
        of_task=True,
    )
    pretrained: str | None = setting(
        None,
        "train a causal language model of transformers (extra hf) instead of the GPT: a folder "
        "that save_pretrained wrote, a .gguf file, or an id on the hub; formats then name that "
        "model's layers; null: train the GPT",
        of_task=True,
    )
    n_layer: int | None = setting(
        None, "number of transformer blocks; null: by size", minimum=1, maximum=4096, of_task=True
    )
    n_head: int | None = setting(
        None, "number of attention heads; null: by size", minimum=1, of_task=True
    )
    n_embd: int | None = setting(
        None, "width, a multiple of n_head; null: by size", minimum=1, of_task=True
    )
    block_size: int | None = setting(
        None, "context length in tokens; null: by size", minimum=1, of_task=True
    )
    init_std: float | None = setting(
        None,
        "standard deviation of random initial weights; that of the projections onto the residual "
        "stream (attn.proj and mlp.proj) is divided by sqrt(2 n_layer); null: GPT-2's, 0.02",
        above=0.0,
    )
    dropout: float = setting(0.0, "dropout probability", minimum=0.0, below=1.0)
    bias: bool | None = setting(None, "bias in Linear and LayerNorm; null: by size (124M: true)")
    tie_weights: bool | None = setting(
        None, "one weight for lm_head and embedding; null: by size (124M: true)"
    )
    gelu: str | None = setting(
        None,
        "exact, or GPT-2's tanh approximation; null: by size (124M: tanh)",
        choices=("exact", "tanh"),
    )
    storage: str | None = setting(
        None,
        "how weights are stored: float32; master (float32 master copy, quantised in the forward "
        "pass); codes (one byte); grid (the values of codes, in float32); continuous (float32 "
        "that steps in the format's geometry and is never rounded); peer (another package's "
        "weights, see peer); null: as the rule says, or as formats and optimizer need",
        choices=STORAGES,
        of_rule=True,
    )
    format: str | None = setting(
        None,
        "weight format of all linear layers; short for formats {'*': FORMAT}",
        of_rule=True,
        of_formats=True,
        rows_by="--formats",
    )
    formats: dict[str, Any] = setting(
        dict,
        "weight formats by layer pattern; for each pattern a format, none for layers that stay "
        "float, or a mapping with keys weight, activation, gradient (each a format, or a mapping "
        "with key format and further options), granularity (tensor, channel, block; square for "
        "weights in one byte), policy (dynamic, static, delayed), history, rounding (nearest, "
        "stochastic, split), ste (identity, clipped, relu, none)",
        of_rule=True,
        of_formats=True,
        words=True,
        maps="layer pattern to format name",
    )
    torchao_float8: str | None = setting(
        None,
        "train the blocks' linear layers by torchao's float8 training with this recipe of scales "
        "(extra torchao; emulated on a device without FP8 products); null: no",
        choices=("tensorwise", "rowwise", "rowwise_with_gw_hp"),
        rows_by="--rules",
    )
    products: str | None = setting(
        None,
        "codes storage: what layers multiply, except lm_head and layers whose own format says it: "
        "decoded (the weights' values as floats), fp8 (codes of E4M3 or E5M2 on FP8 hardware), "
        "int8 (codes of E1M6), or auto (codes on a device that multiplies them, else values); a "
        "CPU emulates fp8 and int8; null: as the rule says, or decoded",
        choices=PRODUCTS,
        of_rule=True,
        of_formats=True,
        storages=(Storage.CODES,),
        rows_by="--rules",
    )
    peer: str | None = setting(
        None,
        "peer storage: package and format of the linear layers' weights (extra torchao); null: as "
        "the rule says",
        choices=tuple(PEER_WEIGHTS),
        of_rule=True,
        rows_by="--rules",
    )
    headroom: float | None = setting(
        None,
        "grid, codes and continuous storage: the largest value of the grid, as a multiple of the "
        "initial amax of a matrix row; null: by format, at most 16 (formats with few binades: 2, "
        "or 1 in codes storage, whose scales can double later)",
        minimum=1.0,
        of_rule=True,
        of_formats=True,
        storages=MANIFOLDS,
    )
    granularity: str | None = setting(
        None,
        "which weights share a scale: those of a tensor, a matrix row (channel), 32 neighbours in "
        "a row (block; codes or master storage), or a square of 128 x 128 (square; codes "
        "storage); null: channel",
        choices=("tensor", "channel", "block", "square"),
        of_rule=True,
        of_formats=True,
    )
    tied: str | None = setting(
        None,
        "what formats do to an lm_head that shares the embedding's weight: untie (the lm_head "
        "gets a quantised copy) or leave (it stays float); null: such formats are refused",
        choices=("untie", "leave"),
        of_rule=True,
        of_formats=True,
    )
    embeddings: str | None = setting(
        None,
        "format of embeddings, and of an lm_head that is tied to them; null: float",
        storages=(Storage.CODES,),
        of_rule=True,
        of_formats=True,
    )
    constraint: str | None = setting(
        None,
        "manifold on which attn.qkv and attn.proj stay: stiefel (orthonormal columns) or sphere "
        "(rows of length 1); null: none",
        choices=("stiefel", "sphere"),
        of_rule=True,
        optimizers=RIEMANNIAN,
    )


class OptimizerConfig(SettingsSection):
    """Settings of the optimizer and its schedules."""

    name: str | None = setting(
        None,
        "the optimizer; null: as the rule says, or adamw",
        choices=tuple(name.value for name in OptimizerName),
        rows_by="--rules",
    )
    lr: float | None = setting(
        None,
        "peak learning rate, in the weights' own unit (riemannian_adam: in ULPs per step; "
        "riemannian_sgd: in ULPs for a code gradient of 1; stiffness_adafactor: relative to the "
        "size of the weights); null: the default of the rule (named, or recognised by its "
        "settings), or of the optimizer",
        above=0.0,
        is_rate=True,
    )
    float_lr: float | None = setting(
        None,
        "second learning rate: of float parameters (riemannian_adam, riemannian_sgd), or of all "
        "but hidden matrices (stiffness_muon); null: as the rule says, or 1e-3 (riemannian_sgd: "
        "0.1; stiffness_muon: 4e-3)",
        above=0.0,
        is_rate=True,
    )
    constrained_lr: float | None = setting(
        None,
        "learning rate of constrained weights: in radians per step of a row or column "
        "(riemannian_adam; null: 0.01), or a factor of the gradient (riemannian_sgd; null: 0.1)",
        above=0.0,
        optimizers=RIEMANNIAN,
    )
    beta1: float | None = setting(
        None, "decay of the first moment; null: 0.9", minimum=0.0, below=1.0
    )
    beta2: float | None = setting(
        None, "decay of the second moment; null: 0.99", minimum=0.0, below=1.0
    )
    momentum: float | None = setting(
        None,
        "momentum of sgd, stiffness_sgd, riemannian_sgd and fisher (null: 0.9), of stiffness_muon "
        "(null: 0.95) and of stiffness_adafactor (null: 0)",
        minimum=0.0,
        below=1.0,
    )
    weight_decay: float | None = setting(
        None,
        "decoupled decay of parameters with two or more dimensions, times lr per step "
        "(riemannian_*: of quantised weights only, times float_lr; sgd on floats: added to the "
        "gradient instead); null: 0.1, for *sgd 0",
        minimum=0.0,
    )
    grad_clip: float = setting(
        1.0, "largest norm of the gradient; 0: no clipping", minimum=0.0, of_rule=False
    )
    clip_by: str | None = setting(
        None,
        "with train.step_in_backward, the norm that is clipped to grad_clip: previous (of the "
        "last step's gradient, or of this step's so far where that is larger) or exact (of this "
        "step's gradient, which takes a second backward pass)",
        choices=("previous", "exact"),
    )
    writeback: str | None = setting(
        None,
        "grid and codes storage: how a step is rounded to the grid; null: as the rule says, or "
        "stochastic",
        choices=WRITEBACKS,
        of_formats=True,
        storages=ROUNDED,
        rows_by="--rules",
    )
    writeback_end: str | None = setting(
        None,
        "grid and codes storage: the write-back after the share step_at of all steps; null: no "
        "change",
        choices=tuple(name for name in WRITEBACKS if name != "momentum"),
        of_formats=True,
        storages=ROUNDED,
    )
    draws: str | None = setting(
        None,
        "grid and codes storage: draws of stochastic rounding, independent at every step, or "
        "dither (spread evenly over the steps); null: independent",
        choices=("independent", "dither"),
        of_formats=True,
        storages=ROUNDED,
    )
    retraction: str | None = setting(
        None,
        "riemannian_adam, riemannian_sgd: the path of a step before it is rounded, straight in "
        "the format's chart (exponential) or straight in value (euclidean); null: exponential",
        choices=("exponential", "euclidean"),
        of_formats=True,
        storages=MANIFOLDS,
    )
    noise: str | None = setting(
        None,
        "continuous storage, for experiments: normal noise that is added after every step, with "
        "the variance that stochastic rounding would have by the format's spacing at each weight "
        "(ulp), its mean over the layer (mean), or that at another weight of the layer "
        "(permuted); null: none",
        choices=("ulp", "mean", "permuted"),
        of_formats=True,
        storages=(Storage.CONTINUOUS,),
    )
    moments: str | None = setting(
        None,
        "the library's own optimizers: how moments are stored; null: as the rule says, or float32",
        choices=MOMENTS,
        of_formats=True,
        rows_by="--rules",
    )
    stiffness: float | None = setting(
        None,
        "stiffness exponent k at the first step, of stiffness_adamw, stiffness_sgd, "
        "stiffness_lion, stiffness_muon, stiffness_adafactor and fisher; null: 0",
        minimum=0.0,
        maximum=4.0,
    )
    stiffness_end: float | None = setting(
        None,
        "same optimizers: stiffness exponent k at the last step; null: k does not change",
        minimum=0.0,
        maximum=4.0,
    )
    stiffness_schedule: str | None = setting(
        None,
        "same optimizers: how k goes from stiffness to stiffness_end; null: linearly",
        choices=COURSES,
    )
    schedule: str = setting(
        "cosine",
        "how the learning rate falls to min_lr_ratio after the warm-up; constant: it does not",
        choices=("cosine", "trapezoid", "constant", "linear", "step"),
        of_rule=False,
    )
    warmup_steps: int = setting(100, "steps of linear warm-up", minimum=0, of_rule=False)
    min_lr_ratio: float = setting(
        0.1,
        "learning rate at the last step, as a share of lr",
        minimum=0.0,
        maximum=1.0,
        of_rule=False,
    )
    step_at: float = setting(
        0.5,
        "share of all steps after which a schedule of step takes its last value, and "
        "writeback_end applies",
        minimum=0.0,
        maximum=1.0,
        of_rule=False,
    )


class TrainConfig(SettingsSection):
    """Settings of the training's length and shape."""

    max_steps: int = setting(
        2000,
        "optimizer steps",
        minimum=1,
        instead="nanogpt-bench evaluate measures a loss without training",
        of_task=True,
    )
    batch_size: int = setting(12, "sequences per micro-batch", minimum=1, of_task=True)
    accumulation: int = setting(1, "micro-batches per step", minimum=1, of_task=True)
    precision: str | None = setting(
        None,
        "float32, bf16-mixed (autocast), or bf16-pure (weights and state in bfloat16); null: as "
        "the rule says, or bf16-mixed",
        choices=tuple(precision.value for precision in Precision),
        of_rule=True,
    )
    step_in_backward: bool = setting(
        False,
        "the library's optimizers: step each parameter in the backward pass, as soon as it has "
        "its gradient, and free that gradient; optimizer.clip_by says how it is clipped; "
        "micro-batches are summed in bfloat16 with stochastic rounding; monitors see no gradients",
    )
    recompute: bool = setting(
        False,
        "model.pretrained: recompute the activations inside each block in the backward pass, and "
        "do not store them",
    )
    parallel: str | None = setting(
        None,
        "how the processes of torchrun share a run: ddp (each holds the whole model and takes "
        "train.batch_size / processes sequences of every batch); null: one process",
        choices=("ddp",),
        changes_numbers=False,
    )
    max_seconds: float | None = setting(
        None, "stop after this many seconds; null: never", above=0.0, changes_numbers=False
    )
    on_anomaly: str = setting(
        "skip",
        "what happens at a step whose loss or gradient is not finite: skip (it is left out; three "
        "in a row end the run) or stop (the first ends the run); without nan in stop_on it never "
        "ends the run; weights or optimizer state that are not finite always do",
        choices=("skip", "stop"),
    )
    stop_on: list[str] = setting(
        lambda: ["nan"],
        "what ends the run early: nan (loss or gradient not finite, see on_anomaly), divergence "
        "(at three validations in a row the smoothed training loss is a tenth above its lowest, "
        "or above that of alerts.baseline), plateau (at five in a row the validation loss has not "
        "fallen by a thousandth)",
        choices=("nan", "divergence", "plateau"),
        changes_numbers=False,
    )


class EvalConfig(SettingsSection):
    """Settings of the validation."""

    interval: int = setting(250, "steps between two validations", minimum=1)
    batches: int = setting(
        20, "batches per validation, of train.batch_size sequences", minimum=1, of_task=True
    )
    also: str | None = setting(
        None,
        "a second prepared text with the same tokenizer, to validate on too: it shows what "
        "fine-tuning forgets",
        is_folder=True,
    )


class RuntimeConfig(SettingsSection):
    """Settings of the machine."""

    device: str = setting(
        "auto", "where to train; auto: on a GPU if there is one", choices=("auto", "cpu", "cuda")
    )
    threads: int | None = setting(
        None, "CPU threads; null: as many as torch chooses", minimum=1, maximum=1024
    )
    compile: bool = setting(
        False,
        "compile the model with torch.compile; the first step and the first validation take long, "
        "and steps that monitors measure with hooks run uncompiled",
    )


class ShadowConfig(SettingsSection):
    """Settings of the float32 model with which gradients are compared."""

    enabled: bool = setting(
        False, "compare gradients with those of a float32 model on the same batches"
    )
    interval: int = setting(100, "steps between two comparisons", minimum=1)


class AlertsConfig(SettingsSection):
    """Settings of the alerts."""

    enabled: bool = setting(
        True, "check for failures during the run, after measurements and validations"
    )
    save_on_anomaly: bool = setting(
        True, "save the state from before the first step that is not finite, to anomaly/"
    )
    baseline: str | None = setting(
        None,
        "a run folder; divergence is judged against its losses; null: against the run's own lowest",
        changes_numbers=True,
    )


class TrackingConfig(SettingsSection):
    """Settings of trackers beside metrics.jsonl."""

    wandb: str = setting(
        "off",
        "Weights & Biases, set up by WANDB_PROJECT, WANDB_ENTITY and WANDB_TAGS of the "
        "environment; auto: online with an API key, otherwise offline",
        choices=tuple(mode.value for mode in WandbMode),
    )
    wandb_id: str | None = setting(None, "W&B run to resume, online only; null: a new one")
    wandb_artifacts: bool = setting(
        False,
        "at the end, upload the last checkpoint to W&B as an artifact with the alias latest",
    )
    tensorboard: bool = setting(False, "write TensorBoard's event files to the run folder")


class CheckpointConfig(SettingsSection):
    """Settings of the checkpoints."""

    every: int | None = setting(
        500,
        "steps between two checkpoints, best a multiple of eval.interval; null: none during the "
        "run. A signal that ends the run always writes one",
        minimum=1,
    )
    last: bool = setting(True, "write a checkpoint when the run ends, unless it failed")
    keep: int = setting(
        2,
        "how many of the newest checkpoints are kept, beside the one with the lowest validation "
        "loss",
        minimum=1,
    )
    best: bool = setting(
        False,
        "write a checkpoint at every validation with the lowest loss so far; otherwise the lowest "
        "loss has a checkpoint only if one was due at that step",
    )


class Config(SettingsSection):
    """One training run.

    `nanogpt_bench.setup.resolve.resolve` fills in the keys that are null.
    """

    rule: str | None = setting(
        None,
        "update rule: a preset of storage, optimizer, write-back and precision; null: none",
        changes_numbers=False,
        of_rule=True,
        rows_by="--rules",
    )
    seed: int = setting(
        42,
        "seed of the initial weights, the data's order and rounding",
        minimum=0,
        maximum=2**64 - 1,
    )
    task: str = setting(
        Task.LANGUAGE.value,
        "language: predict the next token; classify: predict a document's labels from its first "
        "model.block_size tokens, in a corpus that has labels (prepare eurlex --task labels)",
        choices=tuple(task.value for task in Task),
        of_task=True,
    )
    data: DataConfig = section(DataConfig, "The text, and the order in which it is read.")
    model: ModelConfig = section(ModelConfig, "The GPT and the formats of its linear layers.")
    optimizer: OptimizerConfig = section(
        OptimizerConfig,
        "The optimizer, its options and schedules, and its write-back.",
        of_rule=True,
    )
    train: TrainConfig = section(TrainConfig, "The length and the shape of the training.")
    eval: EvalConfig = section(EvalConfig, "The validation, always on the same batches.")
    monitor: MonitorConfig = section(
        MonitorConfig, "Monitors beside the loss; they record each layer, and all layers together."
    )
    shadow: ShadowConfig = section(
        ShadowConfig,
        "A float32 model with the run's current weights. Its gradients are compared with the "
        "run's.",
    )
    alerts: AlertsConfig = section(
        AlertsConfig,
        "Alerts of failures during a run, in alerts.jsonl, on the terminal and in the trackers.",
        changes_numbers=False,
    )
    tracking: TrackingConfig = section(
        TrackingConfig,
        "Trackers that get the record of every step, beside metrics.jsonl.",
        changes_numbers=False,
    )
    checkpoint: CheckpointConfig = section(
        CheckpointConfig,
        "Checkpoints: when the state of a run is saved to its folder, and which are kept.",
        changes_numbers=False,
    )
    runtime: RuntimeConfig = section(RuntimeConfig, "The machine.")
