"""What arithmetic on tensors stands on: sizes of blocks, checks of arguments, fields of floats, reading of values."""
