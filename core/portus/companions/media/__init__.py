"""Memory that is changed in place, beside what was committed."""
