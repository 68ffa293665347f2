"""Plans on a GPU: fused kernels that leave all numbers on the device, and one read of these numbers per plan."""
