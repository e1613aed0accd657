"""Worker processes that train several runs at a time, on this machine or in a Ray cluster."""
