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
        "lr": 0.1,
        "momentum": 0.0,
        "weight_decay": 0.1,
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
        "train on only the first so many tokens of the corpus; null: all",
        minimum=1,
        of_task=True,
    )


class ModelConfig(SettingsSection):
    """Settings of the model and of the formats of its layers."""

    size: str | None = setting(
        None,
        "named size, for what is not given below; 124M is GPT-2's; null: 0.8M, or that of "
        "init_from or pretrained",
        choices=("0.8M", "10M", "50M", "124M"),
        of_task=True,
    )
    init_from: str | None = setting(
        None,
        "weights to start from: a run's folder (its newest checkpoint) or one of its checkpoints; "
        "or a GPT-2 checkpoint in Hugging Face's layout (config.json and model.safetensors): its "
        "folder, an id on the hub, or gpt2, gpt2-medium, gpt2-large, gpt2-xl; null: random weights",
        of_task=True,
    )
    pretrained: str | None = setting(
        None,
        "a causal language model of transformers (extra hf) in place of the GPT: a folder that "
        "save_pretrained wrote, a .gguf file, or an id on the hub; formats then name layers as "
        "that model does; null: the GPT",
        of_task=True,
    )
    n_layer: int | None = setting(
        None, "transformer blocks; null: the size's", minimum=1, maximum=4096, of_task=True
    )
    n_head: int | None = setting(None, "attention heads; null: the size's", minimum=1, of_task=True)
    n_embd: int | None = setting(
        None, "width, a multiple of n_head; null: the size's", minimum=1, of_task=True
    )
    block_size: int | None = setting(
        None, "context length in tokens; null: the size's", minimum=1, of_task=True
    )
    dropout: float = setting(0.0, "dropout probability", minimum=0.0, below=1.0)
    bias: bool | None = setting(None, "bias in Linear and LayerNorm; null: the size's (124M: true)")
    tie_weights: bool | None = setting(
        None, "lm_head shares the embedding's weight; null: the size's (124M: true)"
    )
    gelu: str | None = setting(
        None,
        "exact, or GPT-2's tanh approximation; null: the size's (124M: tanh)",
        choices=("exact", "tanh"),
    )
    storage: str | None = setting(
        None,
        "how weights are stored: float32, master (float32 copy, quantised forward), codes (one "
        "byte), grid (the same values in float32), continuous (float32, the format's geometry "
        "without its rounding) or peer (another package's, see peer); null: the rule's, or what "
        "formats and optimizer call for",
        choices=STORAGES,
        of_rule=True,
    )
    format: str | None = setting(
        None,
        "of all linear layers: formats {'*': FORMAT}",
        of_rule=True,
        of_formats=True,
        rows_by="--formats",
    )
    formats: dict[str, Any] = setting(
        dict,
        "layer pattern -> weight format, none to leave the layer alone, or a mapping with keys "
        "weight, activation, gradient (each a format, or a mapping with key format and further "
        "options), granularity (tensor, channel, block, for weights in one byte square), policy "
        "(dynamic, static, delayed), history, rounding (nearest, stochastic, split), ste "
        "(identity, clipped, relu, none)",
        of_rule=True,
        of_formats=True,
        words=True,
        maps="layer pattern to format name",
    )
    torchao_float8: str | None = setting(
        None,
        "torchao's float8 training of the blocks' linear layers: its recipe of scales (extra "
        "torchao; emulated where the device has no FP8 products); null: none",
        choices=("tensorwise", "rowwise", "rowwise_with_gw_hp"),
        rows_by="--rules",
    )
    products: str | None = setting(
        None,
        "codes storage: how layers multiply, except lm_head and layers whose format says it: "
        "decoded (as floats), fp8 (codes of E4M3 or E5M2 on FP8 hardware), int8 (codes of E1M6), "
        "or auto (what the device has); a CPU emulates fp8 and int8; null: the rule's, or decoded",
        choices=PRODUCTS,
        of_rule=True,
        of_formats=True,
        storages=(Storage.CODES,),
        rows_by="--rules",
    )
    peer: str | None = setting(
        None,
        "peer storage: the package whose weights the linear layers have, and their format (extra "
        "torchao); null: the rule's",
        choices=tuple(PEER_WEIGHTS),
        of_rule=True,
        rows_by="--rules",
    )
    headroom: float | None = setting(
        None,
        "grid, codes and continuous storage: largest value of the grid over a matrix row's "
        "initial amax; null: by format, at most 16 (with few binades 2, or 1 in codes storage, "
        "which widens)",
        minimum=1.0,
        of_rule=True,
        of_formats=True,
        storages=MANIFOLDS,
    )
    granularity: str | None = setting(
        None,
        "one weight scale per tensor, per matrix row (channel), per block of 32 in a row (codes or "
        "master storage), or per square of 128 x 128 (codes storage); null: channel",
        choices=("tensor", "channel", "block", "square"),
        of_rule=True,
        of_formats=True,
    )
    tied: str | None = setting(
        None,
        "with an lm_head that shares the embedding's weight: untie (quantise a copy for the "
        "lm_head) or leave (in float); null: refuse formats that reach it",
        choices=("untie", "leave"),
        of_rule=True,
        of_formats=True,
    )
    embeddings: str | None = setting(
        None,
        "format of embeddings (and a tied head); null: float",
        storages=(Storage.CODES,),
        of_rule=True,
        of_formats=True,
    )
    constraint: str | None = setting(
        None,
        "constraint of attn.qkv and attn.proj: stiefel (orthonormal columns) or sphere (rows of "
        "length 1); null: none",
        choices=("stiefel", "sphere"),
        of_rule=True,
        optimizers=RIEMANNIAN,
    )


class OptimizerConfig(SettingsSection):
    """Settings of the optimizer and its schedules."""

    name: str | None = setting(
        None,
        "null: the rule's, or adamw",
        choices=tuple(name.value for name in OptimizerName),
        rows_by="--rules",
    )
    lr: float | None = setting(
        None,
        "peak learning rate, in value (riemannian_adam: ULPs per step; riemannian_sgd: ULPs for a "
        "code gradient of 1; stiffness_adafactor: in sizes of the weights); null: the rule's, "
        "named or given by its settings, or the optimizer's",
        above=0.0,
        is_rate=True,
    )
    float_lr: float | None = setting(
        None,
        "riemannian_adam, riemannian_sgd: learning rate of float parameters; stiffness_muon: of "
        "all but hidden matrices; null: the rule's, or 1e-3 (riemannian_sgd: 0.1; stiffness_muon: "
        "4e-3)",
        above=0.0,
        is_rate=True,
    )
    constrained_lr: float | None = setting(
        None,
        "rate of constrained weights: for riemannian_adam radians per step of a row or column, "
        "null: 0.01; for riemannian_sgd a factor of the gradient, null: 0.1",
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
        "sgd, stiffness_sgd, riemannian_sgd, fisher, stiffness_muon, stiffness_adafactor: "
        "momentum; null: 0.9, for the last two 0.95 and 0",
        minimum=0.0,
        below=1.0,
    )
    weight_decay: float | None = setting(
        None,
        "decay of parameters with two or more dimensions: decoupled, times lr per step "
        "(riemannian_*: times float_lr, quantised weights only; sgd on floats: added to the "
        "gradient); null: 0.1, for *sgd 0",
        minimum=0.0,
    )
    grad_clip: float = setting(
        1.0, "largest gradient norm; 0: no clipping", minimum=0.0, of_rule=False
    )
    clip_by: str | None = setting(
        None,
        "train.step_in_backward: the norm by which gradients are clipped to grad_clip: that of the "
        "step before, or of this one so far where it is larger (previous), or this step's, from "
        "one more backward pass (exact)",
        choices=("previous", "exact"),
    )
    writeback: str | None = setting(
        None,
        "grid and codes storage: how a step is written back; null: the rule's, or stochastic",
        choices=WRITEBACKS,
        of_formats=True,
        storages=ROUNDED,
        rows_by="--rules",
    )
    writeback_end: str | None = setting(
        None,
        "grid and codes storage: how steps are written back after the share step_at of all steps; "
        "null: as before",
        choices=tuple(name for name in WRITEBACKS if name != "momentum"),
        of_formats=True,
        storages=ROUNDED,
    )
    draws: str | None = setting(
        None,
        "grid and codes storage: random draws of rounding, independent in every step, or dither: "
        "spread evenly over the steps; null: independent",
        choices=("independent", "dither"),
        of_formats=True,
        storages=ROUNDED,
    )
    retraction: str | None = setting(
        None,
        "riemannian_adam, riemannian_sgd: where a step goes before it is rounded, along the "
        "format's chart (exponential) or straight in value (euclidean); null: exponential",
        choices=("exponential", "euclidean"),
        of_formats=True,
        storages=MANIFOLDS,
    )
    noise: str | None = setting(
        None,
        "continuous storage, for experiments: normal noise after every step, of the variance that "
        "stochastic rounding would have, by the format's spacing at each weight (ulp), its mean "
        "over the layer (mean), or that at another weight of the layer (permuted); null: none",
        choices=("ulp", "mean", "permuted"),
        of_formats=True,
        storages=(Storage.CONTINUOUS,),
    )
    moments: str | None = setting(
        None,
        "the library's own optimizers: type of the running averages; null: the rule's, or float32",
        choices=MOMENTS,
        of_formats=True,
        rows_by="--rules",
    )
    stiffness: float | None = setting(
        None,
        "stiffness_adamw, stiffness_sgd, stiffness_lion, stiffness_muon, stiffness_adafactor, "
        "fisher: exponent k at the first step; null: 0",
        minimum=0.0,
        maximum=4.0,
    )
    stiffness_end: float | None = setting(
        None,
        "the same six: k at the last step, reached linearly; null: k stays",
        minimum=0.0,
        maximum=4.0,
    )
    stiffness_schedule: str | None = setting(
        None, "the same six: schedule of k to stiffness_end; null: linear", choices=COURSES
    )
    schedule: str = setting(
        "cosine",
        "schedule of the learning rate after the warm-up: to min_lr_ratio, or none",
        choices=("cosine", "trapezoid", "constant", "linear", "step"),
        of_rule=False,
    )
    warmup_steps: int = setting(100, "steps of linear warm-up", minimum=0, of_rule=False)
    min_lr_ratio: float = setting(
        0.1, "last learning rate over its peak", minimum=0.0, maximum=1.0, of_rule=False
    )
    step_at: float = setting(
        0.5,
        "schedule and stiffness_schedule step, and writeback_end: share of the steps after which "
        "the last value holds",
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
    batch_size: int = setting(12, "sequences in a micro-batch", minimum=1, of_task=True)
    accumulation: int = setting(1, "micro-batches in a step", minimum=1, of_task=True)
    precision: str | None = setting(
        None,
        "float32, bf16-mixed (autocast) or bf16-pure; null: the rule's, or bf16-mixed",
        choices=tuple(precision.value for precision in Precision),
        of_rule=True,
    )
    step_in_backward: bool = setting(
        False,
        "the library's optimizers: step each parameter as soon as it has its gradient, and free "
        "the gradient; see optimizer.clip_by; micro-batches are summed in bfloat16, rounded "
        "stochastically; no monitor sees gradients",
    )
    recompute: bool = setting(
        False,
        "model.pretrained: keep no activations inside a block, compute them again in the backward "
        "pass",
    )
    parallel: str | None = setting(
        None,
        "how the processes of torchrun share a run: ddp, each holds the model and takes "
        "train.batch_size / processes sequences of every batch; null: one process",
        choices=("ddp",),
        changes_numbers=False,
    )
    max_seconds: float | None = setting(
        None, "stop after this many seconds; null: never", above=0.0, changes_numbers=False
    )
    on_anomaly: str = setting(
        "skip",
        "a step whose loss or gradient is not finite is left out, and the run ends after three in "
        "a row (skip) or at the first (stop), if stop_on has nan; weights or optimizer state that "
        "are not finite end it always",
        choices=("skip", "stop"),
    )
    stop_on: list[str] = setting(
        lambda: ["nan"],
        "end the run on steps whose loss or gradient is not finite (nan, see on_anomaly), on a "
        "smoothed training loss a tenth above its lowest, or alerts.baseline's, at three "
        "validations in a row (divergence), on a validation loss that did not fall by a thousandth "
        "at five in a row (plateau)",
        choices=("nan", "divergence", "plateau"),
        changes_numbers=False,
    )


class EvalConfig(SettingsSection):
    """Settings of the validation."""

    interval: int = setting(250, "steps between validations", minimum=1)
    batches: int = setting(20, "batches of train.batch_size sequences", minimum=1, of_task=True)
    also: str | None = setting(
        None,
        "another prepared text, by the same tokenizer, to validate on too: it shows what "
        "fine-tuning forgets",
        is_folder=True,
    )


class RuntimeConfig(SettingsSection):
    """Settings of the machine."""

    device: str = setting("auto", "auto: a GPU if there is one", choices=("auto", "cpu", "cuda"))
    threads: int | None = setting(
        None, "CPU threads; null: torch's own choice", minimum=1, maximum=1024
    )
    compile: bool = setting(
        False,
        "compile the model with torch.compile: the first step and the first validation take long; "
        "steps that monitors measure with hooks run uncompiled",
    )


class ShadowConfig(SettingsSection):
    """Settings of the float32 model with which gradients are compared."""

    enabled: bool = setting(False, "compare gradients with a float32 model's on the same batches")
    interval: int = setting(100, "steps between two comparisons", minimum=1)


class AlertsConfig(SettingsSection):
    """Settings of the alerts."""

    enabled: bool = setting(
        True, "check for failures during the run, after measurements and validations"
    )
    save_on_anomaly: bool = setting(
        True, "save the state before the first step that is not finite, in anomaly/"
    )
    baseline: str | None = setting(
        None,
        "run folder with whose losses divergence is judged; null: the run's own lowest",
        changes_numbers=True,
    )


class TrackingConfig(SettingsSection):
    """Settings of trackers beside metrics.jsonl."""

    wandb: str = setting(
        "off",
        "Weights & Biases, with WANDB_PROJECT, WANDB_ENTITY and WANDB_TAGS of the environment; "
        "auto: online with an API key, otherwise offline",
        choices=tuple(mode.value for mode in WandbMode),
    )
    wandb_id: str | None = setting(None, "run to resume, online only; null: a new one")
    wandb_artifacts: bool = setting(
        False,
        "at the end, upload the last checkpoint to Weights & Biases, as an artifact with the alias "
        "latest",
    )
    tensorboard: bool = setting(False, "write TensorBoard's event files into the run folder")


class CheckpointConfig(SettingsSection):
    """Settings of the checkpoints."""

    every: int | None = setting(
        500,
        "steps between two checkpoints, best a multiple of eval.interval; null: none on the way. "
        "When a signal ends the run, one is always written",
        minimum=1,
    )
    last: bool = setting(True, "a checkpoint when the run ends, unless it failed")
    keep: int = setting(
        2,
        "newest checkpoints that stay; the one with the lowest validation loss stays beside them",
        minimum=1,
    )
    best: bool = setting(
        False,
        "a checkpoint at every validation with the lowest loss so far; without this setting the "
        "lowest loss has a checkpoint only if one was due at that step",
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
        42, "of the initial weights, the data's order and rounding", minimum=0, maximum=2**64 - 1
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
        MonitorConfig, "Monitors beside the loss; they record by layer and over all layers."
    )
    shadow: ShadowConfig = section(
        ShadowConfig,
        "A float32 model with the run's current weights, with whose gradients the run's are "
        "compared.",
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
        "Checkpoints: when the state of a run is saved to its folder, and which of them stay.",
        changes_numbers=False,
    )
    runtime: RuntimeConfig = section(RuntimeConfig, "The machine.")
