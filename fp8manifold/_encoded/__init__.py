"""Tensors of codes: how they are stored, and what torch's operators do with them.

- ``dispatch.py``: what happens when torch calls an operator on one; views.
- ``operators.py``: the operators that work on codes and scales themselves.
- ``scaled.py``: scales, constants, and codes that autocast shares.
- ``stored_scale.py``: scales as they are stored, and how they change.
- ``storage.py``: rounding floats to codes, and decoding them.
- ``products.py``: operands of products on units of eight bits.

The tensor itself is ``fp8manifold/tensor.py``.
"""
