"""The base of arithmetic on tensors: sizes of blocks, checks of arguments, fields of
floats, reading of values.
"""
