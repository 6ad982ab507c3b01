"""Memory that is changed in place, beside its committed bytes."""
