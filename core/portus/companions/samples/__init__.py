"""The samples of an epoch that each rank gets, and those that are left. Numbers only: no data, no
torch.

An epoch has one sequence of samples, whatever the number of ranks. Each step takes the next ones of
it, so the delivered samples are a prefix, given by a count. The samples that are left can be dealt
again to any ranks.
"""
