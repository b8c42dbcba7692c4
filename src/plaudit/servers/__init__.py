"""Parameter servers (`runtime.servers`): islands of ranks push gradients or differences of weights to them."""
