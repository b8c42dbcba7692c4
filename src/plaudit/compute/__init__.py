"""Arithmetic: our own kernels and, without a compiler, plain torch."""
