"""Devices and the compiled library: what there is, finding and loading it, CUDA's own calls."""
