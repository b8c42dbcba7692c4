"""Look at a run before it starts: check its settings, size its models, measure the machine, plan its placement."""
