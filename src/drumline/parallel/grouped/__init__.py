"""Rows sorted by group, times one matrix a group: for any device, and as kernels for GPUs."""
