"""Torch and safetensors files of the data in pools, which ``portus export`` writes."""
