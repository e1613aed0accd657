"""The ways in and out of a model: `load` and `save`.

::

    folder_kind    what a folder has: floats, published codes, ours, or a GGUF file
    load           that folder -> a model in codes, by the reader of its kind
    save           a model -> a folder, in one of the layouts
    plain          a model -> floats that any library reads, and a side file
    side_file      scales, counters and draws beside the floats
    saved_folder   floats and side file -> the very codes
    restore        that, into a model that is there already
    trainers       Trainer resumes from such folders, too
"""
