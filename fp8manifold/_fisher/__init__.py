"""The Fisher information of linear layers: captured, handed to nngeometry, and as a metric."""
