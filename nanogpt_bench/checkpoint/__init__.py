"""Checkpoints on disk: written whole or not at all, every byte of them checked before it is believed.

This package knows files, not trainers. A checkpoint is one file of a run, `checkpoints/step-N.safetensors`, with all
tensors, and in its header everything that is no tensor. Beside it `step-N.safetensors.sha256` has its SHA-256.
"""

from nanogpt_bench.checkpoint.disk import best, bytes_of, check_room, commit, newest, read, read_sum, says_best, verify
from nanogpt_bench.checkpoint.format import (
    CHECKPOINTS,
    BrokenCheckpoint,
    CheckpointNotWritten,
    Contents,
    check_layout,
    clean,
    step_file,
    step_of,
    steps,
)

__all__ = [
    "CHECKPOINTS",
    "BrokenCheckpoint",
    "CheckpointNotWritten",
    "Contents",
    "best",
    "bytes_of",
    "check_layout",
    "check_room",
    "clean",
    "commit",
    "newest",
    "read",
    "read_sum",
    "says_best",
    "step_file",
    "step_of",
    "steps",
    "verify",
]
