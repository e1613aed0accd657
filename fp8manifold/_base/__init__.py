"""What everything builds on: checks of arguments, fields of floats, sizes of blocks."""
