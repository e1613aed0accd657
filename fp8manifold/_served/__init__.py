"""What a trainer hands a server: the codes that it trains, by their published names.

::

    model of fm.load   --published_units-->  units: a weight with its scales, a float, ...
    of quantize_model  --exported_units-->     |
                                               v
    weights     ServedWeights: names, dtypes and shapes; tensors; shards; digests
    changes     ServedChanges: the entries that differ from the last time, as patches
    patch       one patch, and patches put into tensors: all of them, or none
    patch_files patches in a file

Nothing is rounded and nothing is kept: each pass asks the model anew. Most tensors are
views of the model's memory.
"""
