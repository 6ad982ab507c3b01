"""Torch and safetensors files of what is in pools: what ``portus export`` writes."""
