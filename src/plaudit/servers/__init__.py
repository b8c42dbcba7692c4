"""Parameter servers (`runtime.servers`): islands (training workers) push gradients or weight changes to them."""
