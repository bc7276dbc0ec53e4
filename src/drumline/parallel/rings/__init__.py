"""Collective matmuls on rings: gather, reduce-scatter and all-reduce."""
