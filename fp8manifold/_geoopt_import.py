"""The first import of geoopt, without the warnings that its users can't act on.

geoopt scripts one helper with ``torch.jit.script``, which torch has deprecated.
"""

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="`torch.jit.script`")
    import geoopt  # noqa: F401
