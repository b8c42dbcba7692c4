"""What can be said of a run before it starts: check its settings, size its models, measure the machine, plan it."""
