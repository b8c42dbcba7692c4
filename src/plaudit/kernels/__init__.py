"""Kernels of our own for the CPU, compiled when they are first used (`library.py`, `kernels.cpp`)."""
