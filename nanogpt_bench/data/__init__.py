"""Where text comes from: the standard library's own prose, packages, a file, a data set; how it is written to disk."""
