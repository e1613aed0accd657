"""Checkpoints on disk: written whole or not at all, every byte of them checked before it is believed.

This package knows files, not trainers. A checkpoint is a folder `checkpoints/step-N` of a run:

    model.safetensors, optimizer.safetensors, ...   tensors by name; a file without any is left out
    state.json                                      everything that is no tensor
    manifest.json                                   size and SHA-256 of every file, its own SHA-256 last
"""

from nanogpt_bench.checkpoint.format import CHECKPOINTS, BrokenCheckpoint, CheckpointNotWritten, Contents, clean, steps
from nanogpt_bench.checkpoint.read import newest, read, verify
from nanogpt_bench.checkpoint.write import Disk, bytes_of, check_room, commit

__all__ = [
    "CHECKPOINTS",
    "BrokenCheckpoint",
    "CheckpointNotWritten",
    "Contents",
    "Disk",
    "bytes_of",
    "check_room",
    "clean",
    "commit",
    "newest",
    "read",
    "steps",
    "verify",
]
