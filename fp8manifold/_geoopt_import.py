"""The first import of geoopt, which scripts one helper: torch's deprecation of that is
nothing its users can change.
"""

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="`torch.jit.script`")
    import geoopt  # noqa: F401
