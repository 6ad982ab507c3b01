"""Tests that every medium and every place must pass."""
