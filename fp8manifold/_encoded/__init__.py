"""Tensors whose values are stored in another form: their storage, and what operators do
with them.
"""
