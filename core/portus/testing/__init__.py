"""Tests that every place must pass."""
